"""What may wait is limited on request, and the refused are told when to come back."""

from __future__ import annotations

import pytest

from serve.errors import QueueFull
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
    assert scheduler.seconds_to_start(0) is None
    for i in range(3):
        scheduler.add(add_request(f"r{i}", 3, 1))
    for _ in range(2):
        step(scheduler)
        clock.advance(3.0)
    for i in range(3, 5):
        scheduler.add(add_request(f"r{i}", 3, 1))
    with pytest.raises(QueueFull) as refused:
        scheduler.add(add_request("refused", 3, 1))
    assert refused.value.retry_after_s == 9.0 == scheduler.seconds_to_start(num_ahead=2)
    assert "Try again in 9 s" in str(refused.value)
