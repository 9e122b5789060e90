"""Work that has waited too long for its first step is refused; begun work never is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.messages import AddRequest, FinishReason
from serve.scheduler.deadlines import Deadlines
from serve.scheduler.request import RequestStatus, make_request
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, run_until_done, step
from tests.strategies import add_request


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
        request.status = RequestStatus.FINISHED
        deadlines.sweep(num_waiting=0)
    assert len(deadlines._heap) <= 65
