"""The priority policy: lower numbers first, urgent work displaces running work, equals never do."""

from __future__ import annotations

from random import Random

import pytest

from serve.messages import TokenDelta
from serve.scheduler.output import SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from tests.fakes import reference_completion
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import Arrival, Workload, add_request, build, check_drained, drive, limits


def priority_scheduler(**others: object) -> Scheduler:
    return make_scheduler(policy="priority", **others)  # type: ignore[arg-type]


def finish_order(scheduler: Scheduler) -> list[str]:
    order: list[str] = []

    def watch(plan: SchedulerOutput, deltas: list[TokenDelta]) -> None:
        order.extend(d.request_id for d in deltas if d.finish_reason is not None)

    run_until_done(scheduler, after=watch)
    return order


def test_the_lowest_number_runs_first_and_equals_in_order_of_arrival() -> None:
    scheduler = priority_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)):
        scheduler.add(add_request(name, 3, 2, priority=priority))
    assert finish_order(scheduler) == ["d", "b", "e", "a", "c"]


def test_fcfs_ignores_priorities() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -5)):
        scheduler.add(add_request(name, 3, 2, priority=priority))
    assert finish_order(scheduler) == ["a", "b", "c"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_12_an_urgent_request_takes_the_row_of_a_less_urgent_one(mode: str) -> None:
    scheduler = priority_scheduler(max_num_seqs=2, num_host_blocks=64, preemption_mode=mode)
    for name in ("a", "b"):
        scheduler.add(add_request(name, 3, 40, priority=5))
    step(scheduler)
    scheduler.add(add_request("urgent", 3, 2, priority=0))
    plan, _ = step(scheduler)
    assert plan.released == ["b"]
    plan, _ = step(scheduler)
    assert shares(plan) == {"a": 1, "urgent": 3}
    assert finish_order(scheduler) == ["urgent", "a", "b"]


def test_sch_12_equal_priorities_never_displace_each_other() -> None:
    scheduler = priority_scheduler(max_num_seqs=2, num_blocks=100)
    for i in range(6):
        scheduler.add(add_request(f"r{i}", 3, 20, priority=1))
    assert finish_order(scheduler) == [f"r{i}" for i in range(6)]
    assert scheduler.stats().total_preemptions_recompute == 0


def test_urgent_work_makes_room_in_the_pool() -> None:
    scheduler = priority_scheduler(num_blocks=10, max_num_seqs=4)
    for name in ("a", "b"):
        scheduler.add(add_request(name, 12, 8, priority=5))
    step(scheduler)
    scheduler.add(add_request("urgent", 16, 8, priority=0))
    assert step(scheduler)[0].released == ["b"]
    assert "urgent" in shares(step(scheduler)[0])
    assert len(finish_order(scheduler)) == 3


def test_nobody_is_displaced_in_vain() -> None:
    scheduler = priority_scheduler(num_blocks=10, max_num_seqs=4)
    scheduler.add(add_request("staying", 20, 8, priority=0))
    scheduler.add(add_request("small", 4, 8, priority=5))
    step(scheduler)
    scheduler.add(add_request("urgent", 30, 8, priority=1))  # would not fit beside the first
    plan, _ = step(scheduler)
    assert plan.released == []
    assert shares(plan) == {"staying": 1, "small": 1}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_swapped_out_request_does_not_hold_back_more_urgent_ones(mode: str) -> None:
    scheduler = priority_scheduler(
        num_blocks=10, num_host_blocks=20, max_num_seqs=4, preemption_mode=mode
    )
    scheduler.add(add_request("a", 16, 20, priority=0))
    scheduler.add(add_request("b", 16, 20, priority=5))
    while not scheduler.roster.waiting and not scheduler.roster.swapped:
        step(scheduler)
    scheduler.add(add_request("urgent", 2, 2, priority=0))
    plan, _ = step(scheduler)
    assert "urgent" in shares(plan)


def test_sch_13_of_one_priority_the_begun_request_resumes_first() -> None:
    scheduler = priority_scheduler(max_num_seqs=1)
    scheduler.add(add_request("begun", 3, 9, priority=1))
    scheduler.add(add_request("never-ran", 3, 9, priority=1))
    step(scheduler)
    scheduler.add(add_request("urgent", 3, 2, priority=0))
    assert finish_order(scheduler) == ["urgent", "begun", "never-ran"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sch_11_a_mix_of_priorities_in_a_small_pool_finishes(mode: str, depth: int) -> None:
    rng = Random(depth)
    arrivals = [
        Arrival(
            add_request(f"r{i}", rng.randint(1, 20), 30, priority=rng.randint(-2, 2)),
            rng.randint(0, 60),
        )
        for i in range(50)
    ]
    workload = Workload(
        limits(max_num_seqs=6, max_num_batched_tokens=24, policy="priority", preemption_mode=mode),
        num_blocks=20,
        block_size=4,
        num_host_blocks=15,
        depth=depth,
        arrivals=arrivals,
        enable_prefix_caching=True,
    )
    run = drive(build(workload), arrivals)
    for message in (arrival.message for arrival in arrivals):
        wanted = reference_completion(message.prompt_token_ids, message.sampling)
        assert run.completions[message.request_id] == wanted
    stats = run.scheduler.stats()
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 10
    check_drained(run)
