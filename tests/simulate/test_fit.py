"""Costs fitted to steps are the costs those steps had."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import ConfigError
from serve.simulate.cost import LinearCost, StepLoad
from serve.simulate.fit import MeasuredStep, fit_cost


def random_load(rng: Random, *, copies: bool = True) -> StepLoad:
    decodes = rng.randrange(64)
    chunk = rng.choice([0, 0, rng.randrange(2048)])
    return StepLoad(
        num_chunk_tokens=chunk,
        num_chunk_pairs=chunk * rng.randrange(4096),
        num_decodes=decodes,
        num_context_tokens=decodes * rng.randrange(1, 4096),
        num_block_copies=rng.randrange(100) if copies else 0,
    )


def steps_of(cost: LinearCost, rng: Random, count: int = 200, noise: float = 0.0) -> list:
    loads = [random_load(rng) for _ in range(count)]
    return [MeasuredStep(x, cost.seconds(x) * (1 + rng.uniform(-noise, noise))) for x in loads]


coefficients = st.floats(0.1, 10.0)


@given(st.lists(coefficients, min_size=6, max_size=6), st.integers(0, 2**32))
def test_the_fit_recovers_known_coefficients(factors: list[float], seed: int) -> None:
    scales = (6e-3, 3e-5, 1e-9, 3e-5, 5e-8, 8e-5)
    names = ("step_s", "chunk_token_s", "chunk_pair_s", "decode_s", "context_token_s")
    values = [a * b for a, b in zip(factors, scales, strict=True)]
    cost = LinearCost(**dict(zip((*names, "block_copy_s"), values, strict=True)))

    fitted = fit_cost(steps_of(cost, Random(seed)))

    for name, value in cost.as_dict().items():
        assert getattr(fitted.cost, name) == pytest.approx(value, rel=1e-6), name
    assert fitted.mean_error < 1e-9


def test_noise_and_a_stray_step_move_it_little() -> None:
    cost = LinearCost(step_s=5e-3, chunk_token_s=4e-5, decode_s=3e-5, context_token_s=5e-8)
    steps = steps_of(cost, Random(1), count=1000, noise=0.05)
    steps[0] = MeasuredStep(steps[0].load, 30.0)  # a step that compiled something

    fitted = fit_cost(steps)

    assert fitted.cost.chunk_token_s == pytest.approx(cost.chunk_token_s, rel=0.1)
    assert fitted.cost.step_s == pytest.approx(cost.step_s, rel=0.3)
    assert fitted.mean_error < 0.1


def test_no_coefficient_is_negative() -> None:
    rng = Random(0)
    loads = [random_load(rng) for _ in range(100)]
    falling = [MeasuredStep(x, 1.0 / (1 + x.num_decodes)) for x in loads]
    assert min(fit_cost(falling).cost.as_dict().values()) >= 0


def test_what_never_happened_costs_nothing() -> None:
    rng = Random(0)
    loads = [random_load(rng, copies=False) for _ in range(100)]
    fitted = fit_cost([MeasuredStep(x, 1e-3 + 1e-5 * x.num_decodes) for x in loads])
    assert fitted.cost.block_copy_s == 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit_cost([MeasuredStep(StepLoad(1), 1.0)] * 3)
