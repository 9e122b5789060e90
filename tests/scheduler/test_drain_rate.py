"""The queue's rate counts only time in which somebody waits."""

from __future__ import annotations

import pytest

from serve.scheduler.drain_rate import MEMORY_S, DrainRate


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
