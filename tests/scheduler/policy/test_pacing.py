"""The step's token budget follows measured step times; the delay factor holds prompts back, and
only while something runs; prompts may come before decodes."""

from __future__ import annotations

import pytest

from serve.config import SchedulerConfig
from serve.errors import ConfigError
from serve.messages import TokenDelta
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.policy.pacing import MIN_PREFILL_TOKENS, PrefillDelay
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import add_request


def timed_step(
    scheduler: Scheduler, decode_s: float = 0.010, token_s: float = 0.0001
) -> tuple[SchedulerOutput, float]:
    """A step on a device that takes so long for decodes and for each further token."""
    plan = scheduler.schedule()
    duration_s = decode_s + token_s * (plan.num_scheduled_tokens - len(plan.scheduled))
    assert isinstance(scheduler.clock, FakeClock)
    scheduler.clock.advance(duration_s)
    tokens = {entry.request_id: [1] for entry in plan.scheduled if entry.num_samples}
    scheduler.update(plan, StepResult(tokens))
    return plan, duration_s


def busy(target_itl_s: float | None) -> Scheduler:
    scheduler = make_scheduler(
        num_blocks=5000, max_num_batched_tokens=2000, max_model_len=9000, target_itl_s=target_itl_s
    )
    for number in range(4):
        scheduler.add(add_request(f"d{number}", 8, 400))
    for _ in range(5):
        timed_step(scheduler)
    return scheduler


def durations_with_a_long_prompt(scheduler: Scheduler, token_s: float = 0.0001) -> list[float]:
    scheduler.add(add_request("long", 8000, 2))
    seconds = []
    while "long" in scheduler.roster.requests:
        plan, duration_s = timed_step(scheduler, token_s=token_s)
        assert sum(name.startswith("d") for name in shares(plan)) == 4, "a decode was left out"
        seconds.append(duration_s)
    return seconds


def test_inter_token_latency_holds_its_target_while_prefill_takes_the_rest() -> None:
    assert max(durations_with_a_long_prompt(busy(None))) > 0.2
    held = durations_with_a_long_prompt(busy(0.05))
    assert max(held) <= 1.3 * 0.05
    assert sorted(held)[len(held) // 2] >= 0.7 * 0.05, "prefill does not get what is left"


def test_the_budget_follows_a_device_that_turns_slower() -> None:
    held = durations_with_a_long_prompt(busy(0.05), token_s=0.0003)
    assert max(held[20:]) <= 1.3 * 0.05


def test_prompts_advance_though_decodes_alone_take_too_long() -> None:
    scheduler = busy(0.005)
    scheduler.add(add_request("long", 200, 2))
    plan, _ = timed_step(scheduler)
    assert shares(plan)["long"] == MIN_PREFILL_TOKENS


def test_a_target_that_cannot_be_held_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for target_s, told in ((0.05, 0), (0.013, 0), (0.005, 1)):  # 11.6 ms is what a step takes
        caplog.clear()
        scheduler = busy(target_s)
        scheduler.add(add_request("long", 1500, 2))
        for _ in range(80):
            timed_step(scheduler)
        messages = [r.getMessage() for r in caplog.records if "cannot be held" in r.getMessage()]
        assert len(messages) == told
    assert messages == [
        "--target-itl-ms 5 cannot be held while prompts run: a step of decodes and 16 prompt "
        "tokens, the fewest it has then, takes 11.6 ms here"
    ]


def test_nobody_holds_back_a_prompt_that_runs_alone() -> None:
    scheduler = busy(0.05)
    scheduler.abort([f"d{number}" for number in range(4)])
    scheduler.add(add_request("long", 2000, 2))
    plan, _ = timed_step(scheduler)
    assert shares(plan) == {"long": 2000}


def test_prefill_first_has_no_decodes_beside_prompts() -> None:
    scheduler = make_scheduler(step_order="prefill-first", max_num_batched_tokens=16)
    scheduler.add(add_request("a", 4, 20))
    step(scheduler)
    scheduler.add(add_request("b", 40, 3))
    seen = [shares(step(scheduler)[0]) for _ in range(4)]
    assert seen == [{"b": 16}, {"b": 16}, {"b": 8}, {"a": 1, "b": 1}]
    run_until_done(scheduler)


def test_prefill_first_finishes_everything_in_a_tight_pool() -> None:
    scheduler = make_scheduler(step_order="prefill-first", num_blocks=12)
    names = {f"r{number}" for number in range(12)}
    for name in names:
        scheduler.add(add_request(name, 9, 20))
    finished: set[str] = set()

    def watch(plan: SchedulerOutput, deltas: list[TokenDelta]) -> None:
        finished.update(d.request_id for d in deltas if d.finish_reason is not None)

    run_until_done(scheduler, after=watch)
    assert finished == names


def test_a_target_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="--target-itl-ms needs chunked prefill"):
        SchedulerConfig(target_itl_ms=50.0, enable_chunked_prefill=False)


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
