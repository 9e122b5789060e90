"""Who may wait is limited on request, and the refused are told when to come back; work that waited
too long for its first step is refused, begun work never is; the queue's rate counts only time in
which somebody waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.errors import QueueFull
from serve.messages import AddRequest, FinishReason
from serve.scheduler.door import MEMORY_S, Deadlines, DrainRate
from serve.scheduler.request import make_request
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, run_until_done, step
from tests.strategies import add_request


def test_without_limits_everything_may_wait() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for i in range(500):
        scheduler.add(add_request(f"r{i}", 9, 9))
    assert scheduler.stats().num_waiting == 500


def test_a_full_queue_refuses_and_takes_again_once_it_drains() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_queued_reqs=3)
    for i in range(5):  # two for the free rows, three that queue
        scheduler.add(add_request(f"r{i}", 3, 2))
    with pytest.raises(QueueFull, match="3 requests are queued; at most 3 may be"):
        scheduler.add(add_request("refused", 3, 2))
    step(scheduler)
    with pytest.raises(QueueFull):
        scheduler.add(add_request("refused", 3, 2))
    step(scheduler)  # the first two finish
    scheduler.add(add_request("taken", 3, 2))
    assert "taken" in run_until_done(scheduler)


def test_free_rows_do_not_count_as_a_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_queued_reqs=1, max_num_queued_tokens=5)
    for i in range(8):
        scheduler.add(add_request(f"r{i}", 9, 2))
    with pytest.raises(QueueFull):
        scheduler.add(add_request("ninth", 9, 2))


def test_queued_tokens_are_limited_by_their_sum() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_tokens=20)
    scheduler.add(add_request("runs", 12, 2))
    step(scheduler)
    scheduler.add(add_request("queued", 12, 2))
    with pytest.raises(QueueFull, match="12 tokens are queued; at most 20 may be"):
        scheduler.add(add_request("refused", 9, 2))
    scheduler.add(add_request("short", 8, 2))
    scheduler.abort(["queued"])
    scheduler.add(add_request("again", 12, 2))


def test_the_refusal_and_the_estimate_are_of_one_rate_and_idle_time_is_not_in_it() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=2)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    for i in range(4):  # each starts at once, a minute apart: nobody queues
        scheduler.add(add_request(f"alone{i}", 3, 1))
        step(scheduler)
        clock.advance(60.0)
    assert scheduler.view().seconds_to_start(0) is None
    for i in range(3):
        scheduler.add(add_request(f"r{i}", 3, 1))
    for _ in range(2):
        step(scheduler)
        clock.advance(3.0)
    for i in range(3, 5):
        scheduler.add(add_request(f"r{i}", 3, 1))
    with pytest.raises(QueueFull) as refused:
        scheduler.add(add_request("refused", 3, 1))
    assert refused.value.retry_after_s == 9.0 == scheduler.view().seconds_to_start(num_ahead=2)
    assert "Try again in 9 s" in str(refused.value)


def with_timeout(name: str, timeout_s: float | None, max_tokens: int = 9) -> AddRequest:
    return replace(add_request(name, 3, max_tokens, arrival_time=100.0), timeout_s=timeout_s)


def pass_time(scheduler: Scheduler, seconds: float) -> None:
    assert isinstance(scheduler.clock, FakeClock)
    scheduler.clock.advance(seconds)


def test_who_waits_longer_than_its_timeout_is_ended_once() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, timeout_s in (("runs", 5.0), ("patient", None), ("hasty", 5.0)):
        scheduler.add(with_timeout(name, timeout_s))
    step(scheduler)
    assert scheduler.expire() == []
    pass_time(scheduler, 5.5)
    (delta,) = scheduler.expire()
    assert (delta.request_id, delta.finish_reason) == ("hasty", FinishReason.TIMEOUT)
    assert delta.retry_after_s is None
    assert "its timeout" in (delta.error or "")
    assert scheduler.expire() == []
    assert run_until_done(scheduler).keys() == {"runs", "patient"}


def test_the_servers_limit_says_when_to_come_back() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_queue_time_s=5.0)
    for name, timeout_s in (("runs", None), ("late", 60.0)):
        scheduler.add(with_timeout(name, timeout_s))
    step(scheduler)
    pass_time(scheduler, 6.0)
    (delta,) = scheduler.expire()
    assert delta.request_id == "late"
    assert delta.retry_after_s is not None
    assert "--max-queue-time" in (delta.error or "")


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_has_begun_and_does_not_expire(mode: str) -> None:
    scheduler = make_scheduler(
        max_num_seqs=1, policy="priority", preemption_mode=mode, num_host_blocks=20
    )
    scheduler.add(replace(with_timeout("begun", 5.0), priority=1))
    step(scheduler)
    scheduler.add(with_timeout("urgent", 5.0))
    step(scheduler)
    pass_time(scheduler, 60.0)
    assert [delta.request_id for delta in scheduler.expire()] == ["urgent"]
    assert len(run_until_done(scheduler)["begun"]) == 8  # and one before


def test_entries_of_the_begun_do_not_pile_up() -> None:
    deadlines = Deadlines(max_queue_time_s=1000.0)
    for number in range(1000):
        request = make_request(with_timeout(f"r{number}", None), (0, 0.0, number), block_size=4)
        deadlines.add(request)
        request.finish(FinishReason.LENGTH)
        deadlines.sweep(num_waiting=0)
    assert len(deadlines.entries) <= 65


def moved(rate: DrainRate, *steps: tuple[float, int, int]) -> DrainRate:
    for now, num_admitted, num_queued in steps:
        rate.note_step(now, num_admitted=num_admitted, num_queued=num_queued)
    return rate


def test_who_starts_at_once_tells_nothing() -> None:
    rate = moved(DrainRate(), (0.0, 8, 0), (50.0, 1, 0), (90.0, 2, 0))
    assert rate.seconds_for(1, 90.0) is None


def test_a_queue_is_left_at_its_rate_and_idle_time_does_not_count() -> None:
    rate = moved(DrainRate(), (0.0, 1, 3), (2.0, 1, 2), (3.0, 0, 2), (4.0, 1, 1), (6.0, 1, 0))
    assert rate.seconds_for(1, 6.0) == 2.0
    assert rate.seconds_for(5, 40.0) == 10.0
    moved(rate, (50.0, 0, 1), (52.0, 1, 0))
    assert rate.seconds_for(1, 52.0) == 2.0


def test_the_estimate_grows_while_nothing_moves() -> None:
    rate = moved(DrainRate(), (0.0, 1, 3), (2.0, 1, 2), (4.0, 1, 1))
    assert rate.seconds_for(1, 5.0) == 2.0
    assert rate.seconds_for(1, 24.0) == pytest.approx((4 + 20) / 3)


def test_who_moves_together_is_waited_for_together() -> None:
    rate = moved(DrainRate(), (0.0, 8, 32), (8.0, 8, 24), (16.0, 8, 16))
    assert rate.seconds_for(16, 16.0) == 16.0
    assert rate.seconds_for(1, 16.0) == 8.0
    assert rate.seconds_for(1, 22.0) == pytest.approx(2.0)


def test_another_days_queue_is_forgotten() -> None:
    rate = moved(DrainRate(), (0.0, 1, 1), (9.0, 1, 0), (10.0 + MEMORY_S, 0, 1))
    assert rate.seconds_for(1, 10.5 + MEMORY_S) is None
