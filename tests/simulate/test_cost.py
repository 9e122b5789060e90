"""The linear cost of a step, and what a plan's load is."""

from __future__ import annotations

from serve.kv_cache.block_copy import BlockCopy
from serve.scheduler.output import ScheduledRequest, SchedulerOutput
from serve.simulate.cost import LinearCost, StepLoad, load_of


def plan(*shares: tuple[int, int], swap_out: int = 0, swap_in: int = 0) -> SchedulerOutput:
    """A plan of (start, num_tokens) shares."""
    return SchedulerOutput(
        scheduled=[
            ScheduledRequest(f"r{i}", start, count, [0] * count, [], num_samples=1)
            for i, (start, count) in enumerate(shares)
        ],
        admitted=[],
        released=[],
        swap_out=[BlockCopy(1, 0)] * swap_out,
        swap_in=[BlockCopy(0, 1)] * swap_in,
        copy=[],
        num_scheduled_tokens=sum(count for _, count in shares),
    )


def test_decodes_count_the_kv_they_read() -> None:
    assert load_of(plan((9, 1), (99, 1))) == StepLoad(num_decodes=2, num_context_tokens=110)


def test_a_chunk_attends_to_all_before_it_and_to_itself() -> None:
    load = load_of(plan((10, 3)))
    assert (load.num_chunk_tokens, load.num_chunk_pairs) == (3, 11 + 12 + 13)


def test_copies_in_both_directions_count() -> None:
    assert load_of(plan(swap_out=2, swap_in=3)).num_block_copies == 5


def test_every_part_of_the_load_has_its_price() -> None:
    cost = LinearCost(
        step_s=1,
        chunk_token_s=10,
        chunk_pair_s=100,
        decode_s=1e3,
        context_token_s=1e4,
        block_copy_s=1e5,
    )
    assert cost.seconds(StepLoad(1, 2, 3, 4, 5)) == 1 + 10 + 200 + 3e3 + 4e4 + 5e5
