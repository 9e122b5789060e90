"""Limits on prompts that are begun and not finished: they hold after every step."""

from __future__ import annotations

from random import Random

import pytest

from serve.messages import TokenDelta
from serve.scheduler.output import SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import add_request, limits


def partial(scheduler: Scheduler) -> list[int]:
    """Known tokens of the running requests whose prompts are not done."""
    return [r.num_tokens for r in scheduler.roster.running if r.num_uncomputed_tokens > 1]


def test_the_threshold_caps_one_requests_share_of_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    scheduler.add(add_request("long", 30, 2))
    scheduler.add(add_request("short", 5, 2))
    assert shares(step(scheduler)[0]) == {"long": 8, "short": 5}
    assert shares(step(scheduler)[0]) == {"long": 8, "short": 1}


def test_without_limits_prompts_share_what_the_threshold_leaves() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    for name in "abc":
        scheduler.add(add_request(name, 30, 2))
    assert shares(step(scheduler)[0]) == {"a": 8, "b": 8, "c": 4}


def test_one_partial_prefill_at_a_time() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=20, long_prefill_token_threshold=8, max_num_partial_prefills=1
    )
    for name in "ab":
        scheduler.add(add_request(name, 20, 2))
    assert [shares(step(scheduler)[0]) for _ in range(3)] == [
        {"a": 8},
        {"a": 8},
        {"a": 4, "b": 8},  # the first is done in this step
    ]


def test_a_whole_prompt_may_run_beside_a_partial_one() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=20, long_prefill_token_threshold=8, max_num_partial_prefills=1
    )
    scheduler.add(add_request("long", 20, 2))
    scheduler.add(add_request("short", 8, 2))
    assert shares(step(scheduler)[0]) == {"long": 8, "short": 8}


def test_short_prompts_pass_by_long_ones() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=20,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=3,
        max_long_partial_prefills=1,
    )
    for name, length in (("long", 30), ("longer", 40), ("short", 5), ("shorter", 3)):
        scheduler.add(add_request(name, length, 2))
    assert shares(step(scheduler)[0]) == {"long": 8, "short": 5, "shorter": 3}
    finished = run_until_done(scheduler)
    assert finished.keys() == {"long", "longer", "short", "shorter"}


def test_several_partial_prefills_split_the_budget_by_default() -> None:
    resolved = limits(max_model_len=1000, max_num_batched_tokens=100, max_num_partial_prefills=4)
    assert resolved.max_share == 40
    assert limits(max_model_len=1000, max_num_batched_tokens=100).max_share == 100


def test_whole_prompts_are_not_cut_by_the_threshold() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=64, long_prefill_token_threshold=8, enable_chunked_prefill=False
    )
    scheduler.add(add_request("a", 30, 2))
    assert shares(step(scheduler)[0]) == {"a": 30}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("most", "most_long"), [(1, 1), (2, 1), (3, 2), (3, None), (None, 1)])
def test_the_limits_hold_after_every_step(
    policy: str, mode: str, most: int | None, most_long: int | None
) -> None:
    rng = Random(7)
    threshold = 6
    scheduler = make_scheduler(
        num_blocks=30,
        block_size=4,
        num_host_blocks=20,
        max_num_seqs=6,
        max_num_batched_tokens=17,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=most,
        max_long_partial_prefills=most_long,
        policy=policy,
        preemption_mode=mode,
    )
    for i in range(40):
        scheduler.add(
            add_request(f"r{i}", rng.randint(1, 40), rng.randint(1, 24), priority=rng.randint(0, 2))
        )
    seen: list[int] = []

    def holds(plan: SchedulerOutput, deltas: list[TokenDelta]) -> None:
        lengths = partial(scheduler)
        seen.append(len(lengths))
        assert most is None or len(lengths) <= most, lengths
        assert most_long is None or sum(n > threshold for n in lengths) <= most_long, lengths

    assert len(run_until_done(scheduler, after=holds)) == 40
    assert max(seen) >= (most or 1), "the limit was never reached"
