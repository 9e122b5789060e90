"""Fair shares between clients, and ageing, by which nothing starves under priorities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.messages import AddRequest
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, step
from tests.strategies import add_request


def start_order(scheduler: Scheduler, max_steps: int = 5000) -> list[str]:
    """Names in the order of their first steps."""
    order: list[str] = []
    for _ in range(max_steps):
        if not scheduler.has_work():
            return order
        plan, _ = step(scheduler)
        order += [data.request_id for data in plan.admitted]
    raise AssertionError("not done")


def fair(**others: object) -> Scheduler:
    return make_scheduler(policy="fair", max_num_seqs=1, **others)  # type: ignore[arg-type]


def of(client: str, number: int, weight: float = 1.0, tokens: int = 4) -> AddRequest:
    message = add_request(f"{client}{number}", 4, tokens)
    return replace(message, client=client, weight=weight)


def test_a_greedy_client_does_not_keep_a_modest_one_waiting() -> None:
    scheduler = fair()
    for number in range(50):
        scheduler.add(of("greedy", number))
    step(scheduler)
    scheduler.add(of("modest", 0))
    scheduler.add(of("modest", 1))
    order = ["greedy0", *start_order(scheduler)]
    assert order.index("modest0") <= 2
    assert order.index("modest1") <= 4


def test_shares_follow_weights() -> None:
    scheduler = fair()
    for number in range(40):
        scheduler.add(of("heavy", number, weight=3.0))
        scheduler.add(of("light", number, weight=1.0))
    first = Counter(name.rstrip("0123456789") for name in start_order(scheduler)[:40])
    assert first["heavy"] == pytest.approx(30, abs=2)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), min_size=6, max_size=40))
def test_busy_clients_never_differ_by_more_than_one_request_each(
    asked: list[tuple[str, int]],
) -> None:
    """The bound of start-time fair queueing: the longest request of each."""
    scheduler = fair()
    sizes: dict[str, int] = {}
    for number, (client, tokens) in enumerate(asked):
        scheduler.add(of(client, number, tokens=tokens))
        sizes[f"{client}{number}"] = 4 + tokens
    served, left = Counter[str](), Counter(client for client, _ in asked)
    for name in start_order(scheduler):
        client = name[0]
        served[client] += sizes[name]
        left[client] -= 1
        busy = [c for c in left if left[c] > 0]
        for one in busy:
            for other in busy:
                assert served[one] - served[other] <= 2 * max(sizes.values())


def test_idling_saves_up_no_service() -> None:
    scheduler = fair()
    for number in range(20):
        scheduler.add(of("steady", number))
    for _ in range(40):
        step(scheduler)
    for number in range(5):
        scheduler.add(of("late", number))
    order = [name.rstrip("0123456789") for name in start_order(scheduler)]
    assert order[:8].count("steady") >= 3, order


def test_what_was_not_generated_is_given_back() -> None:
    scheduler = fair()
    aborted = of("a", 0, tokens=50)
    scheduler.add(aborted)
    scheduler.abort(["a0"])
    scheduler.add(of("b", 1))
    scheduler.add(of("b", 2))
    scheduler.add(of("a", 3))
    assert start_order(scheduler).index("a3") <= 1


def test_forgotten_clients_leave_nothing_behind() -> None:
    scheduler = fair()
    scheduler.add(of("always-here-", 0))
    for number in range(2000):
        scheduler.add(of("always-here-", number + 1))
        scheduler.add(of(f"client-{number}-", 0))
        for _ in range(8):
            step(scheduler)
    assert len(scheduler._order._clients) <= 1100
    start_order(scheduler)
    assert not scheduler._order._clients


def test_a_change_of_policy_costs_nobody_who_waits_a_place() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    for number in range(3):
        scheduler.add(add_request(f"old{number}", 3, 2, arrival_time=1e6, priority=4))
    for policy in ("fcfs", "fair", "priority"):
        scheduler.set_limits(replace(scheduler.limits, policy=policy))
        scheduler.add(add_request(policy, 3, 2, arrival_time=1e6 + 1, priority=0))
    assert start_order(scheduler) == ["old0", "old1", "old2", "fcfs", "fair", "priority"]


@pytest.mark.parametrize(("aging_s", "starves"), [(0.0, True), (10.0, False)])
def test_a_stream_of_urgent_work_starves_nothing_that_ages(aging_s: float, starves: bool) -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, priority_aging_s=aging_s)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    scheduler.add(add_request("patient", 3, 2, arrival_time=clock(), priority=5))
    done = False
    for number in range(200):
        scheduler.add(add_request(f"u{number}", 3, 2, arrival_time=clock(), priority=0))
        for _ in range(2):
            _, deltas = step(scheduler)
            done |= any(d.request_id == "patient" and d.finish_reason for d in deltas)
        clock.advance(1.0)
    assert done is not starves


def test_an_aged_request_is_not_displaced_by_urgent_work_that_came_later() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1, priority_aging_s=10.0)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    scheduler.add(add_request("aged", 3, 9, arrival_time=clock(), priority=1))
    step(scheduler)
    clock.advance(25.0)
    scheduler.add(add_request("urgent", 3, 2, arrival_time=clock(), priority=0))
    plan, _ = step(scheduler)
    assert plan.released == []
