"""Short prompts pass a long one that has begun; the long one keeps half of each step."""

from __future__ import annotations

from random import Random

import pytest

from serve.scheduler.output import StepResult
from serve.scheduler.policy.passing import TIMES_SHORTER
from serve.scheduler.scheduler import Scheduler
from tests.fair_prefill import LongPrefill, check_prefill_is_fair
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import add_request


def begun(num_tokens: int = 1600, budget: int = 32, **settings: object) -> Scheduler:
    """A scheduler that has spent one step on a long prompt."""
    scheduler = make_scheduler(
        num_blocks=2000,
        max_num_batched_tokens=budget,
        max_model_len=4000,
        **settings,
    )
    scheduler.add(add_request("long", num_tokens, 2))
    assert shares(step(scheduler)[0]) == {"long": budget}
    return scheduler


def steps_until(scheduler: Scheduler, name: str) -> int:
    """Steps until the first token of a request."""
    for number in range(1, 500):
        _, deltas = step(scheduler)
        if any(delta.request_id == name and delta.token_ids for delta in deltas):
            return number
    raise AssertionError(f"{name} never got a token")


def test_a_short_prompt_does_not_wait_for_a_long_prefill() -> None:
    scheduler = begun()
    scheduler.add(add_request("short", 40, 20))
    assert shares(step(scheduler)[0]) == {"long": 16, "short": 16}
    assert shares(step(scheduler)[0]) == {"long": 16, "short": 16}
    assert shares(step(scheduler)[0]) == {"long": 24, "short": 8}
    assert shares(step(scheduler)[0]) == {"long": 31, "short": 1}
    assert steps_until(scheduler, "long") <= 1.1 * 50 - 4


@pytest.mark.parametrize("seed", range(24))
def test_both_sides_of_the_rule_hold_whatever_arrives(seed: int) -> None:
    check_prefill_is_fair(Random(seed))


def test_strict_order_is_a_setting() -> None:
    scheduler = begun(fair_prefill=False)
    scheduler.add(add_request("short", 4, 4))
    assert steps_until(scheduler, "short") == 50  # beside the long one's last tokens


def test_who_is_not_so_much_shorter_waits_for_its_turn() -> None:
    scheduler = begun()
    for name, length in (("other", 1568 // TIMES_SHORTER + 1), ("short", 8), ("third", 2000)):
        scheduler.add(add_request(name, length, 4))
    assert shares(step(scheduler)[0]) == {"long": 24, "short": 8}
    assert shares(step(scheduler)[0]) == {"long": 31, "short": 1}
    steps_until(scheduler, "long")
    assert scheduler.roster.requests["other"].num_computed_tokens > 0
    assert scheduler.roster.requests["third"].num_computed_tokens == 0
    run_until_done(scheduler)


def test_a_long_prompt_with_short_ones_behind_it_shares_its_first_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, num_blocks=1000, max_model_len=2000)
    for name, length in (("long", 1600), ("a", 6), ("b", 30)):
        scheduler.add(add_request(name, length, 2))
    assert shares(step(scheduler)[0]) == {"long": 16, "a": 6, "b": 10}


def test_what_the_prefix_cache_holds_does_not_count_as_length() -> None:
    scheduler = begun()
    scheduler.kv.enable_prefix_caching = True
    history = [5] * 400
    scheduler.abort(["long"])
    scheduler.add(add_request("first", history, 1))
    run_until_done(scheduler)
    scheduler.add(add_request("long", 1600, 2))
    step(scheduler)
    scheduler.add(add_request("second turn", [*history, 1, 2, 3], 2))
    assert shares(step(scheduler)[0])["second turn"] == 3


def test_a_more_urgent_prompt_of_any_length_passes_and_a_less_urgent_one_does_not() -> None:
    scheduler = begun(policy="priority")
    scheduler.add(add_request("urgent", 1000, 2, priority=-1))
    scheduler.add(add_request("short", 8, 2, priority=0))
    assert shares(step(scheduler)[0]) == {"long": 16, "urgent": 16}
    assert shares(step(scheduler)[0]) == {"long": 16, "urgent": 16}
    assert steps_until(scheduler, "urgent") <= 1000 / 16


def test_nobody_overtakes_a_preempted_request_or_a_more_urgent_one() -> None:
    scheduler = begun(policy="priority")
    preempted = add_request("preempted", 900, 2)
    scheduler.add(preempted)
    waiting = scheduler.roster.requests["preempted"]
    scheduler.roster.waiting.remove(waiting)
    waiting.num_preemptions, waiting.first_scheduled_time = 1, 0.0
    scheduler.roster.waiting.push(waiting)
    scheduler.add(add_request("short", 8, 2))
    assert shares(step(scheduler)[0]) == {"long": 32}


def test_a_long_prompt_is_not_preempted_for_those_that_pass_it() -> None:
    """A pool with little room beside it: newcomers wait, or give way themselves."""
    scheduler = make_scheduler(
        num_blocks=110, block_size=4, max_num_batched_tokens=16, max_model_len=500
    )
    scheduler.add(add_request("long", 320, 40))
    step(scheduler)
    rng = Random(3)
    for number in range(200):
        if number < 60:
            scheduler.add(add_request(f"r{number}", rng.randint(1, 12), rng.randint(1, 60)))
        long = scheduler.roster.requests.get("long")
        assert long is None or long.num_preemptions == 0
        step(scheduler)
    run_until_done(scheduler)


@pytest.mark.parametrize(
    "settings",
    [{"step_order": "prefill-first"}, {"target_itl_s": 0.001}, {"policy": "fair"}],
    ids=str,
)
def test_other_settings_are_as_fair(settings: dict[str, object]) -> None:
    scheduler = begun(**settings)
    scheduler.add(add_request("short", 20, 4))
    assert steps_until(scheduler, "short") == 2
    run_until_done(scheduler)


def test_limits_on_partial_prefills_hold_beside_it() -> None:
    scheduler = begun(max_num_partial_prefills=1)
    scheduler.add(add_request("two steps", 20, 4))
    assert shares(step(scheduler)[0]) == {"long": 32}
    scheduler.abort(["two steps"])
    scheduler.add(add_request("one step", 16, 4))
    assert shares(step(scheduler)[0]) == {"long": 16, "one step": 16}


def test_steps_that_are_launched_ahead_share_as_well() -> None:
    scheduler = begun()
    scheduler.add(add_request("short", 20, 8))
    plans = [scheduler.schedule() for _ in range(4)]
    assert [shares(plan)["long"] for plan in plans] == [16, 28, 31, 31]
    for plan in plans:
        tokens = {entry.request_id: [1] for entry in plan.scheduled if entry.num_samples}
        scheduler.update(plan, StepResult(tokens))
    run_until_done(scheduler)


def test_streams_behind_many_that_passed_take_no_more_than_their_half() -> None:
    load = LongPrefill(16, 3000, Scheduler)
    for number in range(40):
        load.scheduler.add(add_request(f"r{number}", 2, 400))
    for _ in range(60):
        load.step()
    assert len(load.streams) == 8
