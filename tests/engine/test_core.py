"""The engine core over a fake device: answers never depend on how they were scheduled."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.engine.core import INTERNAL_ERROR
from serve.engine.health import MAX_FAILURES_IN_A_ROW
from serve.errors import EngineDead
from serve.messages import AbortRequests, AddRequest, FinishReason, Shutdown, ToEngine
from serve.sampling_params import SamplingParams
from serve.scheduler.invariants import check_scheduler
from tests.fakes import FakeInbox, reference_completion
from tests.strategies import (
    Arrival,
    Run,
    Workload,
    add_request,
    build,
    check_drained,
    check_run,
    drive,
    limits,
    random_workload,
    workloads,
)


def make(
    *, num_blocks: int = 64, block_size: int = 4, depth: int = 1, num_host_blocks: int = 0,
    **limit: object,
) -> Run:  # fmt: skip
    """A core with small defaults."""
    return build(Workload(limits(**limit), num_blocks, block_size, num_host_blocks, depth))  # type: ignore[arg-type]


def serve(run: Run, *turns: list[ToEngine]) -> Run:
    """Run the engine's own loop over messages, one list per turn, then shut it down, draining."""
    run.core.inbox = FakeInbox(deque([*turns, [Shutdown(drain=True)]]))
    run.core.run()
    return run


def text_of(run: Run, message: AddRequest) -> list[int]:
    """All token ids a request was told."""
    return [t for delta in run.outbox.deltas(message.request_id) for t in delta.token_ids]


def reference(message: AddRequest) -> list[int]:
    """What it should have been told."""
    return reference_completion(message.prompt_token_ids, message.sampling)


# ---------------------------------------------------------------------------- answers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_scheduling_never_changes_an_answer(workload: Workload) -> None:
    check_run(drive(build(workload), workload.arrivals), workload)


def test_scheduling_never_changes_an_answer_in_fixed_workloads() -> None:
    num_preemptions = 0
    for seed in range(400):
        workload = random_workload(Random(seed))
        run = drive(build(workload), workload.arrivals)
        check_run(run, workload)
        num_preemptions += sum(run.preemptions.values())
    assert num_preemptions > 150, "the workloads have become too easy to show anything"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.sets(st.integers(0, 40), max_size=4))
def test_a_failed_step_ends_its_requests_and_no_others(workload: Workload, bad: set[int]) -> None:
    bad = {number for number in bad if number - 1 not in bad}
    run = build(workload)
    run.executor.fail_on = lambda number, plan: number in bad
    drive(run, workload.arrivals)
    for arrival in workload.arrivals:
        message = arrival.message
        got = run.completions.get(message.request_id, [])
        wanted = reference(message)
        reason = run.reasons.get(message.request_id)
        if reason in (None, FinishReason.ERROR, FinishReason.TIMEOUT):
            assert got == ([] if reason is FinishReason.TIMEOUT else wanted[: len(got)])
            assert reason is not None or message.request_id in run.aborted
        else:
            assert got == wanted
    check_drained(run)


# ---------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_draining_shutdown_finishes_what_was_begun_and_what_waits(depth: int) -> None:
    messages = [add_request(f"r{i}", 5 + i, 6) for i in range(6)]
    run = serve(make(depth=depth, max_num_seqs=2), [*messages])
    assert all(text_of(run, message) == reference(message) for message in messages)
    check_drained(run)


def test_shutdown_without_drain_stops_at_once() -> None:
    run = make()
    run.core.inbox = FakeInbox(deque([[add_request("a", 5, 50)], [], [Shutdown(drain=False)]]))
    run.core.run()
    assert len(run.outbox.deltas("a")) == 2


def test_a_request_that_comes_after_shutdown_is_told_so() -> None:
    run = make()
    first, late = add_request("a", 5, 9), add_request("late", 5, 9)
    run.core.inbox = FakeInbox(deque([[first], [Shutdown(drain=True)], [late]]))
    run.core.run()
    assert text_of(run, first) == reference(first)
    (delta,) = run.outbox.deltas("late")
    assert delta.finish_reason is FinishReason.ERROR
    assert "shutting down" in (delta.error or "")


def test_a_depth_of_two_launches_the_next_step_before_the_last_is_known() -> None:
    run = make(depth=2)
    run.core.handle(add_request("a", 3, 5))
    assert run.core.step() == []  # launched, not retired
    assert [d.token_ids for d in run.core.step()] == [reference(add_request("a", 3, 5))[:1]]
    assert run.scheduler.roster.requests["a"].num_in_flight == 1


def test_val_02_a_request_larger_than_the_pool_is_refused_and_the_next_is_answered() -> None:
    run = make(num_blocks=13, block_size=16, max_model_len=4096, max_num_batched_tokens=64)
    too_long, short = add_request("long", 300, 5), add_request("short", 10, 5)
    serve(run, [too_long, short])
    (delta,) = run.outbox.deltas("long")
    assert delta.finish_reason is FinishReason.ERROR
    assert "208 tokens" in (delta.error or "")
    assert text_of(run, short) == reference(short)
    check_drained(run)


def test_val_02_a_request_that_exactly_fills_the_pool_is_answered() -> None:
    run = make(num_blocks=13, block_size=16, max_model_len=4096, max_num_batched_tokens=64)
    whole = add_request("whole", 13 * 16, 1)
    one_less = add_request("one-less", 12 * 16, 16)
    serve(run, [whole, one_less])
    assert text_of(run, whole) == reference(whole)
    assert text_of(run, one_less) == reference(one_less)


def test_val_03_a_request_that_would_outgrow_the_pool_ends_and_others_are_answered() -> None:
    run = make(num_blocks=16, block_size=4, max_model_len=4096)
    growing, short = add_request("growing", 40, 100), add_request("short", 4, 4)
    serve(run, [growing, short])
    (delta,) = run.outbox.deltas("growing")
    assert delta.finish_reason is FinishReason.ERROR
    assert text_of(run, short) == reference(short)


# ---------------------------------------------------------------------------- figures


def test_met_03_a_chunked_prompt_is_counted_where_it_is_computed() -> None:
    run = serve(make(max_num_batched_tokens=4), [add_request("a", 9, 2)])
    sizes = [n for out in run.outbox.outputs() for n in out.stats.step_tokens]
    assert sizes == [4, 4, 1, 1]
    prompt_totals = [out.stats.total_prompt_tokens for out in run.outbox.outputs()]
    assert prompt_totals[:4] == [4, 8, 9, 9]
    assert run.scheduler.stats().total_generation_tokens == 2


def test_gauges_return_to_zero_with_the_abort_that_empties_the_engine() -> None:
    run = make()
    run.core.inbox = FakeInbox(
        deque([[add_request("a", 5, 50)], [], [AbortRequests(["a"])], [Shutdown(drain=True)]])
    )
    run.core.run()
    before, after = run.outbox.outputs()[-2:]
    assert before.stats.num_running == 1
    assert before.stats.num_blocks_used > 0
    assert (after.stats.num_running, after.stats.num_blocks_used) == (0, 0)
    assert after.deltas == []


def test_nothing_is_sent_when_nothing_changed() -> None:
    run = serve(make(), [add_request("a", 5, 3)], [], [])
    assert [len(out.deltas) for out in run.outbox.outputs()] == [1, 1, 1, 0]


# ---------------------------------------------------------------------------- aborts and ids


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sch_10_aborts_at_any_moment_leave_nothing_behind(depth: int) -> None:
    rng = Random(depth)
    run = make(
        num_blocks=30, depth=depth, num_host_blocks=9, max_num_batched_tokens=5,
        preemption_mode="swap",
    )  # fmt: skip
    arrivals = [
        Arrival(add_request(f"r{i}", rng.randint(10, 50), 8), i, i + rng.randint(0, 60))
        for i in range(100)
    ]
    drive(run, arrivals)
    run.core.handle(AbortRequests(["r3", "r3", "never-seen"]))
    check_drained(run)
    after = add_request("after", 20, 5)
    drive(run, [Arrival(after, 0)])
    assert run.completions["after"] == reference(after)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sch_24_an_id_used_again_right_after_its_abort_is_a_new_request(depth: int) -> None:
    run = make(depth=depth)
    for number in range(50):
        first = add_request("same", [number, 1, 2], 9)
        again = add_request("same", [9, 8, number, 7], 6)
        run.core.handle(first)
        for _ in range(number % 7):
            run.core.step()
        run.core.handle(AbortRequests(["same"]))
        run.core.handle(again)
        got = []
        while run.core.has_work():
            got += [t for delta in run.core.step() for t in delta.token_ids]
            check_scheduler(run.scheduler)
        assert got == reference(again)


# ---------------------------------------------------------------------------- failures


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_that_waits_survives_the_failure_of_others(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(depth=depth, max_num_seqs=1)
    run.executor.fail_on = lambda number, plan: number == 2
    doomed, waiting = add_request("doomed", 5, 30), add_request("waiting", 6, 7)
    serve(run, [doomed, waiting])
    last = run.outbox.deltas("doomed")[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == f"request doomed: {INTERNAL_ERROR}"
    assert "injected into step 2" in caplog.text
    assert last.times is not None
    assert text_of(run, doomed) == reference(doomed)[:2]
    assert text_of(run, waiting) == reference(waiting)
    check_drained(run)


def test_an_executor_that_never_succeeds_is_the_end_of_the_engine() -> None:
    run = make(max_num_seqs=1)
    run.executor.fail_on = lambda number, plan: bool(plan.scheduled)
    messages: list[ToEngine] = [add_request(f"r{i}", 5, 5) for i in range(10)]
    with pytest.raises(EngineDead, match=f"{MAX_FAILURES_IN_A_ROW} steps failed in a row"):
        serve(run, messages)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_number_of_poisonous_requests_leave_a_healthy_engine_alive(depth: int) -> None:
    run = make(max_num_seqs=2, depth=depth)
    run.executor.fail_on = lambda number, plan: any(
        entry.request_id.startswith("poison") for entry in plan.scheduled
    )
    poison: list[ToEngine] = [add_request(f"poison{i}", 5, 5) for i in range(11)]
    fine = add_request("fine", 4, 6)
    serve(run, [*poison[:5], fine, *poison[5:]])
    assert text_of(run, fine) in (reference(fine), [])  # [] if it shared a step with poison
    late = add_request("late", 4, 6)
    run.core._stopping = run.core._stopped = False
    serve(run, [late])
    assert text_of(run, late) == reference(late)
    assert not run.executor.violations
    check_drained(run)


def test_failures_with_a_success_in_between_do_not_end_the_engine() -> None:
    run = make(max_num_seqs=1, max_num_batched_tokens=4)
    run.executor.fail_on = lambda number, plan: (
        bool(plan.scheduled) and plan.scheduled[0].start == 4
    )
    messages: list[ToEngine] = [add_request(f"r{i}", 7, 5) for i in range(8)]
    fine = add_request("fine", 4, 1)
    serve(run, [*messages, fine])
    assert text_of(run, fine) == reference(fine)


def test_a_step_that_cannot_be_launched_fails_after_the_steps_before_it() -> None:
    run = make(depth=2)
    forward = run.executor.forward
    launches = iter([forward, forward, _raise, *[forward] * 20])
    run.executor.forward = lambda plan: next(launches)(plan)  # type: ignore[method-assign]
    message = add_request("a", 4, 9)
    run.core.handle(message)
    deltas = []
    while run.core.has_work():
        deltas += run.core.step()
    assert [t for d in deltas for t in d.token_ids] == reference(message)[:2]
    assert deltas[-1].error == f"request a: {INTERNAL_ERROR}"
    check_drained(run)


def _raise(plan: object) -> None:
    raise MemoryError("no room")


# ---------------------------------------------------------------------------- scoring a prompt


def test_max_tokens_zero_scores_the_prompt_and_ends_with_length() -> None:
    message = AddRequest(
        "a", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=0, prompt_logprobs=0), arrival_time=0.0
    )
    run = serve(make(max_num_batched_tokens=4), [message])
    deltas = run.outbox.deltas("a")
    assert [delta.token_ids for delta in deltas] == [[], []]
    assert [len(delta.prompt_logprobs or []) for delta in deltas] == [4, 1]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    check_drained(run)


# ---------------------------------------------------------------------------- back-pressure


def test_a_full_queue_is_told_with_the_time_to_come_back() -> None:
    run = make(max_num_seqs=1, max_num_queued_reqs=2)
    messages = [add_request(f"r{i}", 3, 3) for i in range(5)]
    serve(run, [*messages])
    refused = [run.outbox.deltas(f"r{i}")[-1] for i in (3, 4)]
    assert all(delta.finish_reason is FinishReason.ERROR for delta in refused)
    assert all(delta.retry_after_s == 1.0 for delta in refused)
    assert all(text_of(run, message) == reference(message) for message in messages[:3])
