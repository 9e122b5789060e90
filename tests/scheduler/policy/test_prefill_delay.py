"""The delay factor holds waiting requests back, and only while something runs."""

from __future__ import annotations

from serve.scheduler.policy.prefill_delay import PrefillDelay


def after_prompt_step(factor: float, took: float) -> PrefillDelay:
    delay = PrefillDelay(factor)
    delay.begin_step(10.0)
    delay.end_step(has_prompt=True)
    delay.begin_step(10.0 + took)
    delay.end_step(has_prompt=False)
    return delay


def test_the_oldest_waits_longer_than_the_factor_times_the_last_prompt_step() -> None:
    delay = after_prompt_step(factor=2.0, took=0.5)
    assert not delay.allows(21.0, earliest_arrival=20.0, num_running=1)
    assert delay.allows(21.1, earliest_arrival=20.0, num_running=1)


def test_decode_steps_do_not_change_what_was_measured() -> None:
    delay = after_prompt_step(factor=2.0, took=0.5)
    for now in (11.0, 15.0, 30.0):
        delay.begin_step(now)
        delay.end_step(has_prompt=False)
    assert not delay.allows(31.0, earliest_arrival=30.0, num_running=1)


def test_an_idle_engine_and_a_factor_of_zero_never_wait() -> None:
    assert after_prompt_step(9.0, 9.0).allows(20.0, earliest_arrival=20.0, num_running=0)
    assert after_prompt_step(0.0, 9.0).allows(20.0, earliest_arrival=20.0, num_running=5)


def test_nothing_is_held_back_before_the_first_prompt_step() -> None:
    assert PrefillDelay(5.0).allows(20.1, earliest_arrival=20.0, num_running=1)
