"""The real engine in virtual time: exact times, the same ones every time."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.simulate.cost import LinearCost
from serve.simulate.settings import MachineConfig
from serve.simulate.simulation import Outcome, simulate
from serve.simulate.workload import SimRequest, Synthetic, draw

STEP = LinearCost(step_s=1.0)


def config(*, num_blocks: int = 100, block_size: int = 16, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_gpu_blocks_override=num_blocks, block_size=block_size),
        scheduler=SchedulerConfig(**scheduler),
    )


def run(requests: list[SimRequest], engine: EngineConfig, cost: LinearCost = STEP) -> Outcome:
    return simulate(requests, engine, MachineConfig().sizes(engine), cost)


def request(arrival_s: float, prompt_len: int, output_len: int, key: int = 0) -> SimRequest:
    return SimRequest(arrival_s, ((key, prompt_len),), output_len)


def test_a_lone_request_takes_a_step_per_token() -> None:
    outcome = run([request(5.0, 10, 4)], config())

    assert outcome.histories[0].token_times == [6.0, 7.0, 8.0, 9.0]
    assert (outcome.num_steps, outcome.busy_s, outcome.end_s) == (4, 4.0, 9.0)
    assert outcome.histories[0].ttft_s == 1.0
    assert outcome.histories[0].tpot_s == 1.0


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    outcome = run([request(0.0, 10, 5), request(1.5, 10, 1, key=1)], config())
    assert outcome.histories[1].token_times == [3.0]
    assert outcome.histories[1].first_scheduled_s == 2.0


def test_a_chunked_prompt_is_paid_for_by_the_token() -> None:
    cost = LinearCost(step_s=0.0, chunk_token_s=0.1, decode_s=1.0)
    outcome = run([request(0.0, 100, 2)], config(max_num_batched_tokens=30), cost)
    assert outcome.histories[0].token_times == pytest.approx([10.0, 11.0])
    assert outcome.num_steps == 5


def test_swapping_is_paid_for_by_the_block() -> None:
    cost = LinearCost(step_s=1e-3, block_copy_s=10.0)
    engine = config(num_blocks=5, block_size=4, preemption_mode="swap")
    outcome = run([request(0.0, 8, 9, key=i) for i in range(2)], engine, cost)
    assert outcome.stats.total_preemptions_swap >= 1
    copied_s = 10.0 * outcome.stats.total_preemption_blocks_swapped
    assert outcome.busy_s == pytest.approx(copied_s + outcome.num_steps * 1e-3, rel=1e-6)


def test_shared_prefixes_are_found_in_the_cache() -> None:
    first, second = SimRequest(0.0, ((1, 64), (2, 5)), 2), SimRequest(10.0, ((1, 64), (3, 5)), 2)
    outcome = run([first, second], config())
    assert [h.num_cached_tokens for h in outcome.histories] == [0, 64]


def test_a_request_that_cannot_fit_is_refused_and_the_others_go_on() -> None:
    outcome = run([request(0.0, 5000, 2), request(0.0, 10, 2, key=1)], config())
    assert outcome.histories[0].refusal is not None
    assert outcome.histories[1].token_times == [1.0, 2.0]


def test_the_pool_in_use_is_measured_while_steps_run() -> None:
    outcome = run([request(0.0, 160, 1)], config(num_blocks=20))
    assert (outcome.kv_use, outcome.max_kv_use) == (0.5, 0.5)


drawn = st.builds(
    Synthetic,
    num_requests=st.integers(1, 30),
    rate=st.sampled_from([0.0, 0.5, 50.0]),
    prompt_len=st.sampled_from(["5", "uniform:1:60", "lognormal:30:1"]),
    output_len=st.sampled_from(["1", "uniform:1:40"]),
    prefix_len=st.sampled_from([0, 16]),
    num_prefixes=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
engines = st.builds(
    config,
    num_blocks=st.integers(10, 60),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    max_num_batched_tokens=st.sampled_from([16, 64, 2048]),
    max_num_seqs=st.sampled_from([2, 256]),
)


@settings(max_examples=25, deadline=None)
@given(drawn, engines)
def test_every_request_ends_once_and_two_runs_are_equal(
    settings: Synthetic, engine: EngineConfig
) -> None:
    requests = draw(settings)
    cost = LinearCost(step_s=0.01, chunk_token_s=1e-4, decode_s=1e-4, block_copy_s=1e-3)
    outcome, again = run(requests, engine, cost), run(requests, engine, cost)

    assert astuple(outcome) == astuple(again)
    for history in outcome.histories:
        times, wanted = history.token_times, history.request
        assert len(times) == (0 if history.refusal else wanted.output_len)
        assert times == sorted(times)
        assert not times or times[0] > wanted.arrival_s
    assert outcome.busy_s <= outcome.end_s + 1e-9
    assert 0 <= outcome.kv_use <= outcome.max_kv_use + 1e-9 <= 1 + 1e-9
