"""What may wait is limited on request, and the refused are told when to come back."""

from __future__ import annotations

import pytest

from serve.errors import QueueFull
from serve.scheduler.back_pressure import BackPressure
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, run_until_done, step
from tests.strategies import add_request, limits


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


def test_the_wait_follows_the_measured_drain_rate() -> None:
    pressure = BackPressure(limits(max_num_queued_reqs=1))
    assert pressure.seconds_until_drained(10, 50.0) == 1.0  # nothing measured yet
    for second in range(0, 40, 2):
        pressure.note_start(float(second))
    assert pressure.seconds_until_drained(10, 40.0) == 20.0  # one start in two seconds
    assert pressure.seconds_until_drained(10, 80.0) == 40.0  # and none since
    assert pressure.seconds_until_drained(0, 40.0) == 1.0


def test_the_refusal_carries_the_wait() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    for i in range(4):
        scheduler.add(add_request(f"r{i}", 3, 1))
        step(scheduler)
        clock.advance(3.0)
    scheduler.add(add_request("runs", 3, 9))
    step(scheduler)
    scheduler.add(add_request("queued", 3, 9))
    with pytest.raises(QueueFull) as refused:
        scheduler.add(add_request("refused", 3, 9))
    assert refused.value.retry_after_s == 3.0
    assert "Try again in 3 s" in str(refused.value)
