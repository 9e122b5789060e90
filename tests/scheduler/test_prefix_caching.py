"""Equal beginnings are computed once, and nothing else is ever shared."""

from __future__ import annotations

from random import Random

import pytest

from serve.messages import AddRequest, TokenDelta
from serve.sampling_params import SamplingParams
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from tests.fakes import reference_completion
from tests.scheduler.driver import make_scheduler, run_until_done, shares, step
from tests.strategies import (
    Arrival,
    Run,
    Workload,
    add_request,
    build,
    check_drained,
    drive,
    limits,
)

BLOCK_SIZE = 4


def caching_scheduler(num_blocks: int = 64, **limit: object) -> Scheduler:
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=BLOCK_SIZE, **limit)  # type: ignore[arg-type]
    scheduler.kv.enable_prefix_caching = True
    return scheduler


def caching_run(*, num_blocks: int = 64, depth: int = 1, **limit: object) -> Run:
    return build(
        Workload(limits(**limit), num_blocks, BLOCK_SIZE, 0, depth, enable_prefix_caching=True)  # type: ignore[arg-type]
    )


def cached_tokens(scheduler: Scheduler, message: AddRequest) -> int:
    """Run one request to its end; how much of its prompt was found."""
    scheduler.add(message)
    told: list[TokenDelta] = []
    run_until_done(scheduler, after=lambda plan, deltas: told.extend(deltas))
    return told[-1].num_cached_tokens


@pytest.mark.parametrize("num_blocks_long", [1, 2, 3])
def test_sch_04_the_last_token_of_a_cached_prompt_is_computed_again(num_blocks_long: int) -> None:
    prompt = list(range(num_blocks_long * BLOCK_SIZE))
    scheduler = caching_scheduler()
    assert cached_tokens(scheduler, add_request("first", prompt, 4)) == 0
    scheduler.add(add_request("second", prompt, 4))
    plan, _ = step(scheduler)
    (entry,) = plan.scheduled
    assert (entry.start, entry.num_tokens) == ((num_blocks_long - 1) * BLOCK_SIZE, BLOCK_SIZE)


@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("copies", [1, 3])
def test_sch_04_a_repeated_prompt_gets_the_same_answer(extra: int, copies: int) -> None:
    prompt = list(range(2 * BLOCK_SIZE + extra))
    run = caching_run()
    again = [add_request(f"again{i}", prompt, 6) for i in range(copies)]
    arrivals = [Arrival(add_request("first", prompt, 6), 0), *(Arrival(m, 20) for m in again)]
    drive(run, arrivals)
    wanted = reference_completion(prompt, SamplingParams(max_tokens=6))
    assert all(tokens == wanted for tokens in run.completions.values())
    assert run.scheduler.stats().total_prefix_cache_hits > 0


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    scheduler = caching_scheduler()
    cached_tokens(scheduler, add_request("first", [5] * 6, 7))  # answers 1 1 1 …; 12 have KV
    follow_up = add_request("second", [5] * 6 + [1] * 7 + [9, 9], 2)
    assert cached_tokens(scheduler, follow_up) == 12


def test_hits_are_counted_in_tokens_and_once_per_request() -> None:
    scheduler = caching_scheduler()
    assert cached_tokens(scheduler, add_request("a", list(range(10)), 2)) == 0
    assert cached_tokens(scheduler, add_request("b", [*range(8), 30, 31], 2)) == 8
    stats = scheduler.stats()
    assert (stats.total_prefix_cache_queries, stats.total_prefix_cache_hits) == (20, 8)
    assert stats.total_prompt_tokens == 20


def test_without_prefix_caching_nothing_is_shared_or_counted() -> None:
    scheduler = make_scheduler(block_size=BLOCK_SIZE)
    for name in ("a", "b"):
        assert cached_tokens(scheduler, add_request(name, list(range(10)), 2)) == 0
    assert scheduler.stats().total_prefix_cache_queries == 0


def test_sch_19_equal_prompts_that_arrive_together_all_get_their_answers() -> None:
    run = caching_run(
        num_blocks=600, max_num_seqs=64, max_num_batched_tokens=1000, max_model_len=64
    )
    messages = [add_request(f"r{i}", [*range(21), i], 5) for i in range(64)]
    drive(run, [Arrival(message, 0) for message in messages])
    for message in messages:
        wanted = reference_completion(message.prompt_token_ids, message.sampling)
        assert run.completions[message.request_id] == wanted


def test_sch_19_a_chunk_still_to_come_is_not_found() -> None:
    scheduler = caching_scheduler(max_num_batched_tokens=10)
    prompt = list(range(16))
    scheduler.add(add_request("a", prompt, 5))
    step(scheduler)  # 10 tokens: two full blocks
    scheduler.add(add_request("b", prompt, 5))
    assert shares(step(scheduler)[0]) == {"a": 6, "b": 4}
    assert scheduler.roster.requests["b"].num_cached_tokens == 8


def test_sch_21_other_salts_share_nothing() -> None:
    scheduler = caching_scheduler()
    prompt, sampling = list(range(12)), SamplingParams(max_tokens=2)

    def salted(name: str, salt: str | None) -> int:
        message = AddRequest(name, prompt, sampling, arrival_time=0.0, cache_salt=salt)
        return cached_tokens(scheduler, message)

    assert [salted("a", "x"), salted("b", "y"), salted("c", None)] == [0, 0, 0]
    assert [salted("d", "x"), salted("e", "y"), salted("f", None)] == [8, 8, 8]


def test_prompts_that_are_to_be_scored_do_not_read_the_cache() -> None:
    scheduler = caching_scheduler()
    prompt = list(range(12))
    cached_tokens(scheduler, add_request("a", prompt, 2))
    scheduler.add(add_request("b", prompt, 2, prompt_logprobs=0))
    assert shares(step(scheduler)[0]) == {"b": 12}


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = caching_scheduler(num_blocks=8, max_num_seqs=2, max_model_len=32)
    scheduler.add(add_request("a", [2] * 8, 6))
    scheduler.add(add_request("b", [3] * 15, 12))
    resumed: list[int] = []

    def watch(plan: SchedulerOutput, deltas: object) -> None:
        if plan.admitted:
            resumed.extend(entry.start for entry in plan.scheduled if entry.request_id == "b")

    run_until_done(scheduler, after=watch)
    assert scheduler.stats().total_preemptions_recompute > 0
    assert resumed[0] == 0
    assert all(start >= 12 for start in resumed[1:])


def test_forgetting_prefixes_leaves_running_requests_alone() -> None:
    run = caching_run()
    prompt = list(range(12))
    first, second, third = (add_request(name, prompt, 9) for name in ("a", "b", "c"))
    drive(run, [Arrival(first, 0)])
    run.core.handle(second)
    run.core.step()
    assert run.scheduler.roster.requests["b"].num_cached_tokens == 8
    run.scheduler.kv.prefixes.forget()
    drive(run, [Arrival(third, 0)])
    wanted = reference_completion(prompt, first.sampling)
    assert run.completions["a"] == run.completions["c"] == wanted
    assert run.scheduler.stats().total_prefix_cache_hits == 8  # c found nothing


def test_met_05_cached_blocks_are_not_blocks_in_use() -> None:
    scheduler = caching_scheduler(num_blocks=200)
    for i in range(40):
        cached_tokens(scheduler, add_request(f"r{i}", [i] * 16, 2))
    stats = scheduler.stats()
    assert stats.num_blocks_used == 0
    assert scheduler.kv.prefixes.num_blocks >= 120


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_17_shared_blocks_are_counted_right(depth: int, mode: str) -> None:
    """Sharing, aborts and too small a pool at once: never above 100 %, and nothing left behind."""
    rng = Random(depth)
    workload = Workload(
        limits(max_num_seqs=6, max_num_batched_tokens=20, max_model_len=40, preemption_mode=mode),
        num_blocks=14,
        block_size=BLOCK_SIZE,
        num_host_blocks=6,
        depth=depth,
        enable_prefix_caching=True,
        arrivals=[
            Arrival(
                add_request(
                    f"r{i}", [i % 3] * rng.randint(1, 20) + [rng.randint(0, 3)], rng.randint(0, 19)
                ),
                turn=i,
                abort_turn=i + rng.randint(0, 60) if rng.random() < 0.3 else None,
            )
            for i in range(170)
        ],
    )
    run = build(workload)
    shared: list[int] = []

    def watch(run: Run) -> None:
        check_scheduler(run.scheduler)
        stats = run.scheduler.stats()
        assert 0 <= stats.num_blocks_used <= 14
        in_tables = sum(len(run.kv.block_ids(r.request_id)) for r in run.scheduler.roster.running)
        shared.append(in_tables - stats.num_blocks_used)

    drive(run, workload.arrivals, after_turn=watch)
    assert max(shared) > 0, "nothing was ever shared"
    assert run.kv.num_blocks_free == 14
    check_drained(run)
    for message in (arrival.message for arrival in workload.arrivals):
        if message.request_id in run.reasons:
            wanted = reference_completion(message.prompt_token_ids, message.sampling)
            assert run.completions.get(message.request_id, []) == wanted
