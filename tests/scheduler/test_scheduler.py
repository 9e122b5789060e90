"""What runs in a step: the budget, the order, who makes room and who comes back."""

from __future__ import annotations

import pytest

from serve.errors import InvalidRequest, PromptTooLong
from serve.messages import FinishReason, TokenDelta, TokenLogprobs
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import add_request


def admitted(plan: SchedulerOutput) -> list[str]:
    return [row.request_id for row in plan.admitted]


# ---------------------------------------------------------------------------- the budget


def test_a_decode_and_a_prompt_share_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add(add_request("a", 4, 9))
    assert shares(step(scheduler)[0]) == {"a": 4}
    scheduler.add(add_request("b", 8, 3))
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 5}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 3}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 1}


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(add_request("a", 9, 2))
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [plan.scheduled[0].num_samples for plan in plans] == [0, 0, 1, 1]
    assert [plan.scheduled[0].start for plan in plans] == [0, 4, 8, 9]


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 65])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_sch_15_prompts_at_the_edge_of_the_budget(budget: int, chunks: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_seqs=8, num_blocks=200)
    for i in range(15):
        scheduler.add(add_request(f"even{i}", min(60, budget * chunks), 3))
        scheduler.add(add_request(f"odd{i}", min(61, budget * chunks + 1), 3))

    def within_budget(plan: SchedulerOutput, deltas: object) -> None:
        assert sum(shares(plan).values()) == plan.num_scheduled_tokens <= budget

    tokens = run_until_done(scheduler, after=within_budget)
    assert len(tokens) == 30
    assert all(len(t) == 3 for t in tokens.values())


def test_sch_15_without_chunking_a_prompt_runs_whole_or_not_at_all() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False
    )
    scheduler.add(add_request("a", 6, 4))
    scheduler.add(add_request("b", 6, 4))
    scheduler.add(add_request("c", 2, 4))  # would fit, but nobody overtakes
    assert shares(step(scheduler)[0]) == {"a": 6}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 6, "c": 2}


def test_without_chunking_the_budget_must_hold_a_whole_context() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 9 and max_model_len is 10"):
        make_scheduler(max_num_batched_tokens=9, max_model_len=10, enable_chunked_prefill=False)


def test_no_more_requests_run_than_there_are_rows() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for i in range(7):
        scheduler.add(add_request(f"r{i}", 2, 5))
    sizes: list[int] = []
    run_until_done(scheduler, after=lambda plan, _: sizes.append(len(plan.scheduled)))
    assert max(sizes) == 3


def test_a_budget_below_the_number_of_running_requests_serves_the_eldest_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2, max_num_seqs=4)
    for name in "abcd":
        scheduler.add(add_request(name, 1, 4))
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 1}
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 1}
    assert len(run_until_done(scheduler)) == 4


# ---------------------------------------------------------------------------- refused at the door


def test_val_02_a_prompt_larger_than_the_pool_is_refused_by_name() -> None:
    scheduler = make_scheduler(num_blocks=13, block_size=16, max_model_len=4096)
    with pytest.raises(PromptTooLong, match="300 tokens and max_tokens is 1, but the KV cache"):
        scheduler.add(add_request("a", 300, 1))
    assert not scheduler.has_work()


def test_val_03_a_request_that_would_outgrow_the_pool_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_model_len=4096)
    with pytest.raises(PromptTooLong, match="holds 64 tokens"):
        scheduler.add(add_request("a", 40, 100))


def test_val_03_a_request_that_just_fits_finishes_without_preemption() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_model_len=4096)
    scheduler.add(add_request("a", 40, 25))  # the last token needs no KV
    assert len(run_until_done(scheduler)["a"]) == 25
    assert scheduler.stats().total_preemptions_recompute == 0


def test_more_than_the_context_is_refused_by_name() -> None:
    scheduler = make_scheduler(max_model_len=64)
    with pytest.raises(PromptTooLong, match="64 tokens of context"):
        scheduler.add(add_request("a", 60, 5))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        make_scheduler().add(add_request("a", [], 5))


# ---------------------------------------------------------------------------- ends


def last_delta_reason(scheduler: Scheduler, token_ids: list[int]) -> FinishReason | None:
    """Answer with these tokens one by one; the reason told with the last."""
    reason = None
    for token_id in token_ids:
        assert reason is None, "ended too early"
        _, (delta,) = step(scheduler, token_id)
        reason = delta.finish_reason
    return reason


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([7, 7, 7], FinishReason.LENGTH),
        ([7, 2], FinishReason.STOP),
        ([7, 7, 2], FinishReason.STOP),  # on the last allowed position
    ],
)
def test_lim_01_length_is_told_from_stop(tokens: list[int], reason: FinishReason) -> None:
    scheduler = make_scheduler()
    scheduler.add(add_request("a", 4, 3, stop_token_ids=(2, 3)))
    assert last_delta_reason(scheduler, tokens) is reason


def test_lim_01_a_full_context_is_length() -> None:
    scheduler = make_scheduler(max_model_len=8)
    scheduler.add(add_request("a", 5, 3))
    assert last_delta_reason(scheduler, [7, 7, 7]) is FinishReason.LENGTH


def test_lim_02_without_a_stop_token_generation_ends_with_the_context() -> None:
    scheduler = make_scheduler(max_model_len=64)
    scheduler.add(add_request("a", 10, 54, ignore_eos=True))
    assert len(run_until_done(scheduler)["a"]) == 54


def test_stop_tokens_do_not_count_before_min_tokens_are_there() -> None:
    scheduler = make_scheduler()
    scheduler.add(add_request("a", 4, 9, stop_token_ids=(2,), min_tokens=4))
    assert last_delta_reason(scheduler, [7, 2, 7, 2, 2]) is FinishReason.STOP


def test_max_tokens_zero_ends_with_the_prompt_and_no_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(add_request("a", 6, 0))
    assert step(scheduler)[1] == []
    plan, (delta,) = step(scheduler)
    assert not plan.scheduled[0].num_samples
    assert (delta.token_ids, delta.finish_reason) == ([], FinishReason.LENGTH)


def test_a_finished_request_gives_back_its_row_in_the_next_plan() -> None:
    scheduler = make_scheduler()
    scheduler.add(add_request("a", 3, 1))
    step(scheduler)
    assert scheduler.has_work()
    assert step(scheduler)[0].released == ["a"]
    assert not scheduler.has_work()


# ---------------------------------------------------------------------------- preemption


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_sch_01_preemption_neither_loses_nor_repeats_tokens(mode: str) -> None:
    scheduler = make_scheduler(
        num_blocks=40, num_host_blocks=40, max_num_seqs=8, max_model_len=128, preemption_mode=mode
    )
    for i in range(8):
        scheduler.add(add_request(f"r{i}", 5, 100))
    tokens = run_until_done(scheduler)
    assert all(len(t) == 100 for t in tokens.values())
    stats = scheduler.stats()
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 0
    assert stats.total_prompt_tokens == 8 * 5
    assert stats.total_generation_tokens == 8 * 100
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("host_blocks", [0, 8, 100])
@pytest.mark.parametrize("victim", ["last-admitted", "least-progress", "most-blocks", "cheapest"])
def test_sch_09_preemption_never_livelocks(mode: str, host_blocks: int, victim: str) -> None:
    scheduler = make_scheduler(
        num_blocks=75, block_size=4, num_host_blocks=host_blocks, max_num_seqs=10,
        max_model_len=200, preemption_mode=mode, preemption_victim=victim,
    )  # fmt: skip
    for i in range(10):
        scheduler.add(add_request(f"r{i}", 8, 192))
    preemptions: dict[str, int] = {}
    eldest: list[str] = []

    def watch(plan: SchedulerOutput, deltas: list[TokenDelta]) -> None:
        assert shares(plan).keys() >= set(eldest), f"{eldest}, the eldest running, stands still"
        eldest[:] = [request.request_id for request in scheduler.roster.running[:1]]
        for delta in deltas:
            if delta.times is not None:
                preemptions[delta.request_id] = delta.times.num_preemptions

    tokens = run_until_done(scheduler, after=watch)
    assert all(len(t) == 192 for t in tokens.values())
    assert preemptions["r0"] == 0
    assert max(preemptions.values()) < 10
    assert sum(preemptions.values()) > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_13_a_preempted_request_resumes_before_any_that_never_ran(mode: str) -> None:
    scheduler = make_scheduler(
        num_blocks=10, num_host_blocks=10, max_num_seqs=3, preemption_mode=mode, max_model_len=40
    )
    for name in "abcde":
        scheduler.add(add_request(name, 6, 30))
    order: list[str] = []
    waiting_preempted: set[str] = set()

    def watch(plan: SchedulerOutput, deltas: object) -> None:
        for name in admitted(plan):
            if name in order:
                waiting_preempted.discard(name)
            else:
                assert not waiting_preempted, f"{name} starts before {waiting_preempted} resume"
            order.append(name)
        waiting_preempted.update(
            r.request_id
            for r in scheduler.roster.requests.values()
            if r.num_preemptions
            and r.request_id not in {x.request_id for x in scheduler.roster.running}
        )

    run_until_done(scheduler, after=watch)
    assert len(order) > 5, "nothing was preempted"


def test_the_last_in_order_makes_room() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=2)
    scheduler.add(add_request("a", 8, 12))
    scheduler.add(add_request("b", 8, 12))
    while not scheduler.stats().total_preemptions_recompute:
        plan, _ = step(scheduler)
    assert plan.released == ["b"]
    assert shares(plan) == {"a": 1}
    assert [r.num_computed_tokens for r in scheduler.roster.waiting] == [0]


def test_what_preemption_costs_is_counted() -> None:
    for mode, host_blocks in (("recompute", 0), ("swap", 6)):
        scheduler = make_scheduler(
            num_blocks=6, num_host_blocks=host_blocks, max_num_seqs=2, preemption_mode=mode
        )
        scheduler.add(add_request("a", 8, 12))
        scheduler.add(add_request("b", 8, 12))
        run_until_done(scheduler)
        stats = scheduler.stats()
        recomputed = stats.total_preemption_tokens_recomputed
        assert (recomputed, stats.total_preemption_blocks_swapped) == (
            (12, 0) if mode == "recompute" else (0, 6)
        )


def test_a_full_host_tier_falls_back_to_recompute() -> None:
    scheduler = make_scheduler(
        num_blocks=6, block_size=4, num_host_blocks=1, max_num_seqs=2, preemption_mode="swap"
    )
    scheduler.add(add_request("a", 8, 12))
    scheduler.add(add_request("b", 8, 12))
    run_until_done(scheduler)
    stats = scheduler.stats()
    assert stats.total_preemptions_swap == 0
    assert stats.total_preemptions_recompute > 0


def test_a_swapped_request_comes_back_where_it_was() -> None:
    scheduler = make_scheduler(
        num_blocks=6, block_size=4, num_host_blocks=6, max_num_seqs=2, preemption_mode="swap"
    )
    scheduler.add(add_request("a", 8, 12))
    scheduler.add(add_request("b", 8, 12))
    plans: list[SchedulerOutput] = []
    run_until_done(scheduler, after=lambda plan, _: plans.append(plan))
    (swap_out,) = [plan for plan in plans if plan.swap_out]
    (swap_in,) = [plan for plan in plans if plan.swap_in]
    assert len(swap_in.swap_in) == len(swap_out.swap_out) == 3
    (entry,) = [e for e in swap_in.scheduled if e.request_id == "b"]
    assert (entry.start, entry.num_tokens) == (12, 1)


def test_swapped_requests_come_before_waiting_ones() -> None:
    scheduler = make_scheduler(
        num_blocks=8, block_size=4, num_host_blocks=8, max_num_seqs=3, preemption_mode="swap"
    )
    scheduler.add(add_request("a", 12, 18))
    scheduler.add(add_request("b", 12, 18))
    while not scheduler.roster.swapped:
        step(scheduler)
    scheduler.add(add_request("tiny", 1, 2))
    plans: list[SchedulerOutput] = []
    run_until_done(scheduler, after=lambda plan, _: plans.append(plan))
    assert [name for plan in plans for name in admitted(plan)] == ["b", "tiny"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=6, max_model_len=32)
    for i in range(12):
        scheduler.add(add_request(f"r{i}", 4, 24))

    def watch(plan: SchedulerOutput, deltas: object) -> None:
        finished = {i for i in plan.released if i not in scheduler.roster.requests}
        assert not (plan.admitted and set(plan.released) - finished)

    run_until_done(scheduler, after=watch)


def test_admission_leaves_the_watermark_free() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    scheduler.add(add_request("a", 12, 8))
    scheduler.add(add_request("b", 20, 8))  # 3 + 5 blocks: would leave none
    assert admitted(step(scheduler)[0]) == ["a"]


def test_a_lone_request_may_use_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    scheduler.add(add_request("a", 32, 1))
    assert admitted(step(scheduler)[0]) == ["a"]


def test_prompt_logprobs_are_told_once_though_the_prompt_is_computed_twice() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=5)
    scheduler.add(add_request("a", 8, 12))
    scheduler.add(add_request("b", 8, 12, prompt_logprobs=0))
    told: list[int] = []
    computed = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        scored = {}
        for entry in plan.scheduled:
            last = min(entry.start + entry.num_tokens, 7)
            if entry.request_id == "b" and entry.start < last:
                positions = range(entry.start + 1, last + 1)
                scored["b"] = [TokenLogprobs(p, -1.0, 1, [], []) for p in positions]
                computed += len(positions)
        tokens = {entry.request_id: [1] for entry in plan.scheduled if entry.num_samples}
        for delta in scheduler.update(plan, StepResult(tokens, {}, scored)):
            told += [entry.token_id for entry in delta.prompt_logprobs or []]
    assert told == [1, 2, 3, 4, 5, 6, 7]
    assert computed > len(told), "nothing was computed twice"


# ---------------------------------------------------------------------------- waiting on purpose


def test_the_delay_factor_lets_the_queue_fill_while_something_runs() -> None:
    scheduler = make_scheduler(delay_factor=2.0)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    scheduler.add(add_request("a", 8, 30, arrival_time=clock.now))
    step(scheduler)  # a prompt step, which takes 0.5 s
    clock.advance(0.5)
    scheduler.add(add_request("b", 8, 5, arrival_time=clock.now))
    assert shares(step(scheduler)[0]) == {"a": 1}
    clock.advance(0.9)
    scheduler.add(add_request("c", 8, 5, arrival_time=clock.now))
    assert shares(step(scheduler)[0]) == {"a": 1}  # b has waited 0.9 s, not more than 2 x 0.5 s
    clock.advance(0.2)
    assert shares(step(scheduler)[0]) == {"a": 1, "b": 8, "c": 8}


def test_the_delay_factor_never_delays_an_idle_engine() -> None:
    scheduler = make_scheduler(delay_factor=1000.0)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    for name in "ab":
        scheduler.add(add_request(name, 8, 1, arrival_time=clock.now))
        assert shares(step(scheduler)[0]) == {name: 8}
        clock.advance(5.0)


# ---------------------------------------------------------------------------- times and figures


def test_times_tell_a_requests_history_once() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_seqs=2)
    clock = scheduler.clock
    assert isinstance(clock, FakeClock)
    scheduler.add(add_request("a", 8, 12, arrival_time=90.0))
    scheduler.add(add_request("b", 8, 12, arrival_time=95.0))
    finished = {}
    first = {}
    told: dict[str, list[int]] = {"a": [], "b": []}
    while scheduler.has_work():
        _, deltas = step(scheduler)
        for delta in deltas:
            first.setdefault(delta.request_id, clock.now)
            if delta.times is not None:
                told[delta.request_id].append(delta.times.num_preemptions)
                finished[delta.request_id] = delta.times
        clock.advance(1.0)
    assert told == {"a": [0, 0], "b": [0, 1, 1]}  # first token, preemption, end
    assert finished["a"].num_preemptions == 0
    assert finished["b"].num_preemptions == 1
    for name, times in finished.items():
        assert times.first_scheduled_time == 100.0
        assert times.first_token_time == first[name]
        assert times.finished_time > times.first_token_time


def test_step_sizes_are_handed_over_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(add_request("a", 5, 2))
    step(scheduler)
    assert scheduler.stats().step_tokens == [5]
    assert scheduler.stats().step_tokens == []


def test_thousands_of_waiting_requests_do_not_change_a_plan() -> None:
    few, many = make_scheduler(max_num_seqs=2), make_scheduler(max_num_seqs=2)
    for scheduler, number in ((few, 4), (many, 20_000)):
        for i in range(number):
            scheduler.add(add_request(f"r{i}", [1, 2], 3))
    for _ in range(4):
        assert shares(few.schedule()) == shares(many.schedule())
    many.abort([f"r{i}" for i in range(2, 20_000)])
    assert many.stats().num_waiting == 0


def test_a_request_with_nothing_left_to_draw_ends_with_the_reason_and_alone() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(add_request(name, 3, 9))
    step(scheduler)
    plan = scheduler.schedule()
    result = StepResult({"a": [], "b": [5]}, failed={"a": "no token was left"})

    deltas = {delta.request_id: delta for delta in scheduler.update(plan, result)}

    assert (deltas["a"].token_ids, deltas["a"].error) == ([], "no token was left")
    assert deltas["a"].finish_reason is FinishReason.ERROR
    assert (deltas["b"].token_ids, deltas["b"].finish_reason) == ([5], None)
    assert "a" in step(scheduler)[0].released
