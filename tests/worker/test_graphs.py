"""Replayed decode steps: the same answers and the same cache as steps launched kernel by kernel."""

from __future__ import annotations

import logging
from functools import partial
from random import Random

import pytest
import torch

from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.worker.graphs import GraphSize, capture_sizes, mixed_sizes
from tests.worker.async_device import GraphDevice
from tests.worker.harness import Asked, RunnerStand, next_token, plan, row_data, share

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


def stands(graph_sizes: list[int]) -> tuple[RunnerStand, RunnerStand, GraphDevice]:
    """One that replays and one that does not, with the same rubbish in every block."""
    device = GraphDevice()
    replaying = RunnerStand(num_blocks=40, device=device, graph_sizes=graph_sizes)
    eager = RunnerStand(num_blocks=40)
    for stand in (replaying, eager):
        torch.manual_seed(0)
        for layer in stand.storage.layers:
            layer.copy_(torch.randn(layer.shape))
    return replaying, eager, device


def num_replays(device: GraphDevice) -> int:
    return sum(graph.num_replays for graph in device.recorder.graphs)


def check_step(
    step: SchedulerOutput, replaying: RunnerStand, eager: RunnerStand
) -> list[list[int]]:
    """Both answer alike, and hold the same in every block but the null block."""
    found = replaying.runner.execute(step).wait().token_ids
    assert found == eager.runner.execute(step).wait().token_ids
    for ours, theirs in zip(replaying.storage.layers, eager.storage.layers, strict=True):
        assert torch.equal(ours[:, 1:], theirs[:, 1:])
    return list(found.values())


@pytest.mark.parametrize("sizes", [[8], [1, 2, 4, 8], [3, 5]])
def test_replays_equal_eager_steps_and_padding_touches_the_null_block_only(
    sizes: list[int],
) -> None:
    random = Random(1)
    replaying, eager, device = stands(sizes)
    tokens = {f"r{n}": [random.randrange(VOCAB) for _ in range(n + 1)] for n in range(8)}
    blocks = {name: list(range(1 + 5 * n, 6 + 5 * n)) for n, name in enumerate(tokens)}
    first = plan(
        [share(name, 0, known) for name, known in tokens.items()],
        admitted=[row_data(n, Asked(GREEDY, prompt=t), blocks[n]) for n, t in tokens.items()],
    )
    new = check_step(first, replaying, eager)
    for known, (token,) in zip(tokens.values(), new, strict=True):
        known.append(token)
    expected = 0
    for count in (8, 3, 5, 1, 2, 8, 4):  # smaller after larger: old inputs must not come back
        names = random.sample(sorted(tokens), count)
        step = plan([share(n, len(tokens[n]) - 1, tokens[n][-1:]) for n in names])
        for name, (token,) in zip(names, check_step(step, replaying, eager), strict=True):
            assert token == next_token(tokens[name], VOCAB)
            tokens[name].append(token)
        expected += count <= max(sizes)
    assert num_replays(device) == expected


def test_tokens_in_flight_reach_a_replay() -> None:
    replaying, _, device = stands([1, 2])
    prompt = [5, 6, 7]
    first = plan([share("a", 0, prompt)], admitted=[row_data("a", Asked(GREEDY, prompt), [3, 4])])
    decodes = [plan([share("a", position, [], num_tokens=1)]) for position in range(3, 7)]
    pending = [replaying.runner.execute(step) for step in (first, *decodes)]
    known = list(prompt)
    for launched in pending:
        known += launched.wait().token_ids["a"]
        assert known[-1] == next_token(known[:-1], VOCAB)
    assert num_replays(device) == 5


def test_steps_with_prompts_are_replayed_beside_single_tokens_and_alone() -> None:
    """Prompts whole and in chunks, some of them sampled, after larger and smaller steps."""
    replaying, eager, device = stands([1, 8])
    tokens = {name: [7 * n + 1, *range(n, 12 + n)] for n, name in enumerate("abcdef")}
    blocks = {name: list(range(1 + 6 * n, 7 + 6 * n)) for n, name in enumerate("abcdef")}

    def rows(*names: str) -> list[RowData]:
        return [row_data(n, Asked(GREEDY, prompt=tokens[n]), blocks[n]) for n in names]

    def whole(name: str) -> ScheduledRequest:
        return share(name, 0, tokens[name])

    def next_of(name: str) -> ScheduledRequest:
        return share(name, len(tokens[name]) - 1, tokens[name][-1:])

    def chunk(name: str, start: int, end: int) -> ScheduledRequest:
        known = tokens[name]
        return share(name, start, known[start:end], num_samples=int(end == len(known)))

    for admitted, parts in (
        ("abc", [(whole, "a"), (whole, "b"), (partial(chunk, start=0, end=5), "c")]),
        (
            "d",
            [(next_of, "a"), (next_of, "b"), (partial(chunk, start=5, end=13), "c"), (whole, "d")],
        ),
        ("", [(next_of, "b")]),
        ("", [(next_of, name) for name in "abcd"]),
        ("e", [(next_of, "d"), (partial(chunk, start=0, end=1), "e"), (next_of, "a")]),
        ("f", [(next_of, "b"), (partial(chunk, start=1, end=7), "e"), (whole, "f")]),
        ("", [(partial(chunk, start=7, end=13), "e")]),
    ):
        shares = [make(name) for make, name in parts]
        step = plan(shares, admitted=rows(*admitted))
        sampled = [entry.request_id for entry in shares if entry.num_samples]
        found = check_step(step, replaying, eager)
        assert len(found) == len(sampled)
        # Single tokens come first in a step's order.
        ordered = [
            e.request_id for e in sorted(shares, key=lambda e: e.num_tokens != 1) if e.num_samples
        ]
        for name, (token,) in zip(ordered, found, strict=True):
            assert token == next_token(tokens[name], VOCAB)
            tokens[name].append(token)
    assert num_replays(device) == 7


def test_a_step_with_prompts_takes_a_recording_that_does_not_compute_much_more() -> None:
    sizes = mixed_sizes([1, 8, 64, 256])
    assert {size.singles for size in sizes} == {8, 32, 128, 256}
    assert mixed_sizes([1, 4]) == [GraphSize(4, 4, 64), GraphSize(4, 4, 256)]
    _, _, device = stands([64])
    assert len(device.recorder.graphs) == 1 + 3 * 2


def test_larger_steps_and_prompt_scores_are_not_replayed() -> None:
    replaying, eager, device = stands([4])
    scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
    check_step(
        plan(
            [share("a", 0, [5, 6]), share("b", 0, [7], num_samples=0)],
            admitted=[
                row_data("a", Asked(scored, prompt=[5, 6, 9]), [1]),
                row_data("b", Asked(scored, prompt=[7, 8, 9]), [2]),
            ],
        ),
        replaying,
        eager,
    )
    step = plan([share("b", 1, [8], num_samples=0)])
    eager.runner.execute(step).wait()
    result = replaying.runner.execute(step).wait()
    assert [s.token_id for s in result.prompt_logprobs["b"]] == [9]
    many = [f"r{number}" for number in range(5)]
    prompts = plan(
        [share(name, 0, [5, 6]) for name in many],
        admitted=[row_data(n, Asked(GREEDY, prompt=[5, 6]), [5 + i]) for i, n in enumerate(many)],
    )
    check_step(prompts, replaying, eager)
    assert num_replays(device) == 0, "five prompts are one too many"


def test_recording_leaves_a_line_with_sizes_and_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        RunnerStand(device=GraphDevice(), graph_sizes=[1, 2, 4])
    assert "recorded CUDA graphs for 3 batch sizes up to 4, and 2 with prompts: " in caplog.text
    assert "0.00 GiB" in caplog.text


def test_a_device_that_cannot_record_runs_without_graphs() -> None:
    stand = RunnerStand(graph_sizes=[1])
    step = plan([share("a", 0, [5])], admitted=[row_data("a", Asked(GREEDY, prompt=[5]), [1])])
    assert stand.runner.execute(step).wait().token_ids == {"a": [next_token([5], VOCAB)]}


@pytest.mark.parametrize(
    ("wanted", "max_num_seqs", "sizes"),
    [
        ((), 1, [1]),
        ((), 3, [1, 2, 3]),
        ((), 30, [1, 2, 4, 8, 16, 24, 30]),
        ((64, 8, 8, 1000), 256, [8, 64]),
        ((1000,), 256, []),
    ],
)
def test_default_sizes_reach_every_step_and_named_ones_are_kept(
    wanted: tuple[int, ...], max_num_seqs: int, sizes: list[int]
) -> None:
    assert capture_sizes(wanted, max_num_seqs) == sizes
