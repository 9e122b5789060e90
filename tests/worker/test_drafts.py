"""Several positions of a request in one step: the tokens of as many steps, whatever was drafted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from serve.errors import OutOfMemory
from serve.kernels.sampling import SamplingKernels
from serve.messages import TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.worker.device.device import Device
from serve.worker.executor import TokenMask
from serve.worker.sampling.drafts import Drafts
from tests.kernels.cpu_kernels import compiled
from tests.worker.async_device import AsyncDevice, GraphDevice
from tests.worker.harness import Asked, RunnerStand, cpu, plan, row_data, share

VOCAB = 97
PROMPT = [5, 6, 7, 8, 9]
BLOCKS = [1, 2, 3, 4, 5, 6, 7, 8]
COUNT = 12

WARM = SamplingParams(temperature=1.6, seed=11)
WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": WARM,
    "top": replace(WARM, top_k=9, top_p=0.9, min_p=0.01, logprobs=3),
    "repetition": SamplingParams(
        temperature=0.0, repetition_penalty=5.0, logprobs=2, allowed_token_ids=(10, 20, 30, 40)
    ),
    "frequency": replace(
        WARM, frequency_penalty=1.5, presence_penalty=0.7, logprobs=0, allowed_token_ids=(1, 2, 3)
    ),
    "lists": replace(WARM, allowed_token_ids=tuple(range(0, 97, 7)), logit_bias={14: 2.0}),
    "min_tokens": replace(WARM, temperature=0.5, min_tokens=6, stop_token_ids=tuple(range(40))),
    "bad_words": replace(
        WARM,
        allowed_token_ids=(1, 2, 3),
        bad_words_token_ids=((1, 2), (3, 3), (2, 1, 1), (9, 3)),
        presence_penalty=0.5,
    ),
}


def one_by_one(sampling: SamplingParams) -> tuple[list[int], list[TokenLogprobs]]:
    """What single steps give."""
    stand = RunnerStand()
    tokens, scores, start = list(PROMPT), [], 0
    admitted = [row_data("a", Asked(sampling, PROMPT), BLOCKS)]
    while len(tokens) < len(PROMPT) + COUNT:
        step = plan([share("a", start, tokens[start:])], admitted=admitted)
        result = stand.runner.execute(step).wait()
        admitted, start = [], len(tokens)
        tokens += result.token_ids["a"]
        scores += result.logprobs.get("a", [])
    return tokens[len(PROMPT) :], scores


def with_drafts(
    stand: RunnerStand, sampling: SamplingParams, wanted: list[int], random: Random
) -> tuple[list[int], list[TokenLogprobs], int]:
    """The same by steps with up to three drafts, some wrong, beside a prompt and a decode."""
    tokens, scores, start, steps = list(PROMPT), [], 0, 0
    other = [50, 51]
    admitted = [
        row_data("a", Asked(sampling, PROMPT), BLOCKS),
        row_data("b", Asked(WARM, other), [9, 10, 11, 12, 13]),
        row_data("c", Asked(WARM, [60] * 40), [14, 15, 16, 17, 18, 19]),
    ]
    other_start = 0
    while len(tokens) < len(PROMPT) + COUNT:
        known = len(tokens) - len(PROMPT)
        drafts = wanted[known : known + random.randint(0, 3)]
        drafts = [t if random.random() < 0.8 else (t + 1) % VOCAB for t in drafts]
        entries = [
            share("c", steps, [60], num_samples=0),
            share("a", start, tokens[start:] + drafts, num_samples=1 + len(drafts)),
            share("b", other_start, other[other_start:]),
        ]
        result = stand.runner.execute(plan(entries, admitted=admitted)).wait()
        admitted, start, other_start = [], len(tokens), len(other)
        assert 1 <= len(result.token_ids["a"]) <= 1 + len(drafts)
        assert set(result.token_ids) == {"a", "b"}
        tokens += result.token_ids["a"]
        other += result.token_ids["b"]
        scores += result.logprobs.get("a", [])
        start = len(tokens) - 1
        steps += 1
    return tokens[len(PROMPT) :], scores, steps


@pytest.mark.parametrize("kind", ["torch", "cpu", "behind", "graphs"])
@pytest.mark.parametrize("wish", WISHES)
def test_drafts_right_and_wrong_change_no_token_and_no_logprob(wish: str, kind: str) -> None:
    devices: dict[str, Device] = {"behind": AsyncDevice(), "graphs": GraphDevice()}
    sampling: SamplingKernels | None = compiled(2).sampling if kind == "cpu" else None
    graph_sizes = (1, 4) if kind == "graphs" else ()
    wanted, scores = one_by_one(WISHES[wish])
    for seed in range(3):
        stand = RunnerStand(
            device=devices.get(kind, cpu()), graph_sizes=graph_sizes, sampling=sampling
        )

        found, scored, steps = with_drafts(stand, WISHES[wish], wanted, Random(seed))

        assert found[:COUNT] == wanted
        assert steps < COUNT
        assert len(scored) == (len(found) if scores else 0)
        for ours, single in zip(scored, scores, strict=False):
            assert (ours.token_id, ours.rank) == (single.token_id, single.rank)
            assert ours.top_token_ids == single.top_token_ids
            assert ours.logprob == pytest.approx(single.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("wish", "history"), [("repetition", "count"), ("frequency", "count"), ("bad_words", "follow")]
)
def test_a_position_that_forgot_the_drafts_before_it_would_show(
    wish: str, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = one_by_one(WISHES[wish])
    monkeypatch.setattr(Drafts, history, lambda self, remembered, places: remembered)

    answers = [
        with_drafts(RunnerStand(), WISHES[wish], wanted, Random(seed))[0] for seed in range(3)
    ]

    assert any(answer[:COUNT] != wanted for answer in answers)


def test_a_step_launched_after_drafts_runs_the_last_token_of_use() -> None:
    """The host does not know it yet: it lies behind the drafts that were right."""
    wanted, _ = one_by_one(WISHES["greedy"])
    for num_right in range(3):
        stand = RunnerStand(device=AsyncDevice())
        drafts = [*wanted[:num_right], *([90, 91, 92][num_right:])]
        admitted = [row_data("a", Asked(WISHES["greedy"], PROMPT), BLOCKS)]
        first = plan([share("a", 0, PROMPT + drafts, num_samples=4)], admitted=admitted)
        after = plan([share("a", len(PROMPT) + num_right, [], num_tokens=1)])

        pending = [stand.runner.execute(step) for step in (first, after)]

        found = [step.wait().token_ids["a"] for step in pending]
        assert found == [wanted[: num_right + 1], wanted[num_right + 1 : num_right + 2]]


def only(*allowed: int) -> list[int]:
    """One row of a mask's bits."""
    bits = np.zeros(128, dtype=np.bool_)
    bits[list(allowed)] = True
    words: list[int] = np.packbits(bits, bitorder="little").view(np.int32).tolist()
    return words


def masked(rows: list[int], bits: list[list[int]]) -> TokenMask:
    return TokenMask(np.array(rows), np.array(bits, dtype=np.int32).reshape(len(rows), 4))


def run(stand: RunnerStand, step: SchedulerOutput, mask: TokenMask) -> StepResult:
    return stand.runner.forward(step).sample(mask).wait()


@pytest.mark.parametrize(
    "device", [cpu(), AsyncDevice(), GraphDevice()], ids=["cpu", "behind", "graphs"]
)
def test_a_mask_names_positions_as_the_plan_counts_them(device: Device) -> None:
    """Not as the batch has them, where requests with a single token come first."""
    greedy = WISHES["greedy"]
    stand = RunnerStand(device=device, graph_sizes=(4,) if isinstance(device, GraphDevice) else ())
    free, _ = one_by_one(greedy)
    admitted = [
        row_data("a", Asked(greedy, PROMPT), BLOCKS),
        row_data("b", Asked(greedy, [50]), [9, 10]),
        row_data("c", Asked(WARM, [51, 52, 53]), [11, 12]),
    ]
    step = plan(
        [
            share("c", 0, [51], num_samples=0),
            share("a", 0, [*PROMPT, 33, 44], num_samples=3),
            share("b", 0, [50]),
        ],
        admitted=admitted,
    )

    result = run(stand, step, masked([3, 0, 1], [only(70, 71), only(33), only(44, 45)]))

    assert result.token_ids["a"][:2] == [33, 44]
    assert len(result.token_ids["a"]) == 3  # the last one is free
    assert result.token_ids["b"][0] in (70, 71)
    assert not result.failed
    steady = plan([share("b", 1, result.token_ids["b"]), share("a", 7, result.token_ids["a"][2:])])
    assert run(stand, steady, masked([1], [only(9)])).token_ids["a"] == [9]
    assert free[0] != 33


def test_a_position_with_nothing_left_fails_its_request_alone_after_the_tokens_before_it() -> None:
    stand = RunnerStand()
    greedy = WISHES["greedy"]
    wanted, _ = one_by_one(greedy)
    admitted = [
        row_data("a", Asked(greedy, PROMPT), BLOCKS),
        row_data("b", Asked(replace(greedy, allowed_token_ids=(3, 4)), [50]), [9, 10]),
        row_data("c", Asked(greedy, [51]), [11]),
        row_data("d", Asked(greedy, PROMPT), [12, 13, 14]),
    ]
    step = plan(
        [
            share("a", 0, [*PROMPT, wanted[0], wanted[1]], num_samples=3),
            share("b", 0, [50]),
            share("c", 0, [51]),
            share("d", 0, [*PROMPT, wanted[0] - 1], num_samples=2),  # wrong: its second is unused
        ],
        admitted=admitted,
    )

    result = run(stand, step, masked([1, 3, 6], [only(), only(5, 6), only()]))

    assert result.token_ids["a"] == wanted[:1]
    assert result.token_ids["b"] == []
    assert len(result.token_ids["c"]) == 1
    assert result.token_ids["d"] == wanted[:1]
    assert set(result.failed) == {"a", "b"}
    assert "no token was left" in result.failed["b"]


def test_a_mask_may_speak_of_requests_whose_step_before_has_failed() -> None:
    stand = RunnerStand()
    greedy = WISHES["greedy"]
    stand.model.fail_next = True
    bad = plan([share("a", 0, PROMPT)], admitted=[row_data("a", Asked(greedy, PROMPT), BLOCKS)])
    with pytest.raises(RuntimeError):
        stand.runner.forward(bad)
    step = plan(
        [share("a", 5, [], num_tokens=1), share("b", 0, [50])],
        admitted=[row_data("b", Asked(greedy, [50]), [9])],
    )

    assert run(stand, step, masked([0, 1], [only(1), only(2)])).token_ids == {"b": [2]}


def test_no_memory_for_the_choice_of_tokens_is_a_failed_step_and_keeps_no_logits() -> None:
    stand = RunnerStand()
    admitted = [row_data("a", Asked(WISHES["greedy"], PROMPT), BLOCKS)]
    launch = stand.runner.forward(plan([share("a", 0, PROMPT)], admitted=admitted))
    record = stand.rows.record

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    stand.rows.record = full  # type: ignore[method-assign]
    with pytest.raises(OutOfMemory):
        launch.sample(None)
    stand.rows.record = record  # type: ignore[method-assign]

    assert launch.logits is None
    after = plan([share("a", 5, [], num_tokens=1)])
    assert stand.runner.execute(after).wait().token_ids == {}
