"""Speculation over the real core and the fake device: drafts right and wrong, every shortage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from serve.kv_cache.manager import KVCacheManager
from serve.messages import FinishReason
from serve.sampling_params import Grammar
from serve.scheduler.drafting import speculator
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import ScheduledRequest, StepResult
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.request import Request
from serve.scheduler.step_results import StepResults
from tests.engine.test_state_machine import EngineMachine
from tests.fakes import FakeExecutor, hash_tokens, next_token, reference_completion
from tests.scheduler.drafting.oracle import check_figures, speculate
from tests.scheduler.driver import make_scheduler
from tests.strategies import (
    Arrival,
    Run,
    Workload,
    add_request,
    build,
    check_run,
    drive,
    limits,
    random_workload,
    workloads,
)


def run_with_drafts(workload: Workload) -> Run:
    run = build(workload)
    oracle = speculate(run.scheduler)
    check_run(drive(run, workload.arrivals), workload)
    check_figures(run.scheduler)
    assert oracle.kept == set()
    return run


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_drafts_never_change_an_answer(workload: Workload) -> None:
    run_with_drafts(workload)


def test_drafts_are_accepted_and_rejected_in_fixed_workloads() -> None:
    runs = [run_with_drafts(random_workload(Random(seed))) for seed in range(300)]
    stats = [run.scheduler.stats() for run in runs]
    accepted = sum(s.total_spec_accepted_tokens for s in stats)
    drafted = sum(s.total_spec_draft_tokens for s in stats)
    assert accepted > 1000
    assert drafted - accepted > 1000
    preempted = sum(s.total_preemptions_swap + s.total_preemptions_recompute for s in stats)
    assert preempted > 100


class SpeculatingMachine(EngineMachine):
    """The same in any order of events."""

    def build_run(self) -> Run:
        run = super().build_run()
        speculate(run.scheduler)
        return run


TestSpeculatingMachine = SpeculatingMachine.TestCase
TestSpeculatingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------------- known mistakes


def keeps_rejected(self: Request, num_rejected: int) -> None:
    self.num_tokens += 1 - num_rejected


def takes_back_too_much(self: Request, num_rejected: int) -> None:
    self.num_tokens += 1 - num_rejected
    self.num_computed_tokens -= num_rejected + 1


def goes_on_meanwhile(
    self: Request, share: ScheduledRequest, drafts: list[int], new_block_ids: list[int]
) -> ScheduledRequest:
    made = DRAFT(self, share, drafts, new_block_ids)
    self.num_tokens += 1
    return made


def forgets_new_blocks(
    self: Request, share: ScheduledRequest, drafts: list[int], new_block_ids: list[int]
) -> ScheduledRequest:
    return DRAFT(self, share, drafts, [])


def commits_what_was_guessed(self: StepResults, entry: ScheduledRequest, request: Request) -> None:
    computed = entry.start + entry.num_tokens
    request.committed(computed, self._kv.block_size)
    if self._kv.enable_prefix_caching and request.request_id in self._kv._tables:
        self._kv.commit(request.request_id, request.known_hashes(), computed)


def takes_shares_as_planned(
    self: StepResults, entries: list[ScheduledRequest], requests: list[Request], result: StepResult
) -> list[ScheduledRequest]:
    WITHOUT_REJECTED(self, entries, requests, result)
    return entries


def exceeds_the_budget(
    self: PlanBuilder, place: int, drafts: list[int], new_block_ids: list[int]
) -> None:
    before = self.tokens_left
    ADD_DRAFTS(self, place, drafts, new_block_ids)
    self.tokens_left = before


def drafts_for_the_future(share: ScheduledRequest, request: Request) -> bool:
    return share.num_samples == 1


DRAFT = Request.draft
ADD_DRAFTS = PlanBuilder.add_drafts
WITHOUT_REJECTED = StepResults._without_rejected
MISTAKES: list[tuple[Any, str, Callable[..., Any]]] = [
    (Request, "verified", keeps_rejected),
    (Request, "verified", takes_back_too_much),
    (Request, "draft", goes_on_meanwhile),
    (Request, "draft", forgets_new_blocks),
    (StepResults, "_commit", commits_what_was_guessed),
    (PlanBuilder, "add_drafts", exceeds_the_budget),
    (speculator, "_may_draft", drafts_for_the_future),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[2].__name__)
def test_a_seeded_bug_in_drafting_is_caught(
    mistake: tuple[Any, str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mistake)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever breaks first
        run_many(1500)


def run_many(count: int) -> None:
    for seed in range(count):
        run_with_drafts(random_workload(Random(seed)))


# ---------------------------------------------------------------------------- cases


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_one_that_is_preempted_while_its_drafts_are_out_goes_on_where_it_was(mode: str) -> None:
    """With two steps at once an urgent request may come in between."""
    scheduler = make_scheduler(
        num_blocks=6, num_host_blocks=8, max_num_seqs=1, policy="priority", preemption_mode=mode
    )
    speculate(scheduler)
    executor = FakeExecutor(6, 4, 8, 1, 64)
    calm = add_request("r", 4, 16, priority=1)
    scheduler.add(calm)
    got: list[int] = []
    urgent = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        launch = executor.forward(plan)
        meanwhile = None
        if plan.num_drafts and urgent < 5:
            urgent += 1
            scheduler.add(add_request(f"u{urgent}", 4, 1, priority=0))
            meanwhile = scheduler.schedule()
            assert "r" in meanwhile.released
            queued_launch = executor.forward(meanwhile)
        deltas = scheduler.update(plan, launch.wait())
        if meanwhile is not None:
            check_scheduler(scheduler)
            queues = scheduler.roster.waiting, scheduler.roster.swapped
            for queue in queues:
                assert queue.num_tokens == sum(request.num_tokens for request in queue)
            deltas += scheduler.update(meanwhile, queued_launch.wait())
        got += [token for d in deltas if d.request_id == "r" for token in d.token_ids]
        check_scheduler(scheduler)
    assert urgent >= 3
    assert got == reference_completion(calm.prompt_token_ids, calm.sampling)


def reuse_an_answer(num_generated: int, seed: int) -> None:
    """Ask for an answer that drafts were part of, and then go on behind it."""
    scheduler = make_scheduler(num_blocks=16, max_num_batched_tokens=40)
    scheduler.kv.enable_prefix_caching = True
    speculate(scheduler)
    executor = FakeExecutor(16, 4, 0, 8, 40)
    first = add_request("first", 4, 30)
    known = first.prompt_token_ids
    stop = reference_completion(known, first.sampling)[num_generated - 1]
    for name in (f"first {seed}", "second"):
        message = add_request(name, known, 30, stop_token_ids=(stop,))
        scheduler.add(message)
        got: list[int] = []
        while scheduler.has_work():
            plan = scheduler.schedule()
            deltas = scheduler.update(plan, executor.forward(plan).wait())
            got += [token_id for delta in deltas for token_id in delta.token_ids]
        assert got == reference_completion(known, message.sampling)
        known = [*known, *got, 0]


def reuse_answers() -> None:
    for num_generated in range(4, 24, 4):
        for seed in range(10):
            reuse_an_answer(num_generated, seed)


def test_the_prefix_cache_never_holds_what_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    reuse_answers()
    monkeypatch.setattr(StepResults, "_without_rejected", takes_shares_as_planned)
    with pytest.raises(AssertionError):
        reuse_answers()


def one_request(num_blocks: int, prompt: int, max_tokens: int, **sampling: object) -> Workload:
    return Workload(
        limits(max_model_len=64),
        num_blocks,
        16,
        0,
        1,
        [Arrival(add_request("r", prompt, max_tokens, **sampling), 0)],
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 9}, {"ignore_eos": True}])
def test_spec_02_a_stop_token_inside_a_draft_ends_the_answer(
    depth: int, sampling: dict[str, object]
) -> None:
    plain = one_request(8, 5, 30)
    prompt = plain.arrivals[0].message.prompt_token_ids
    tokens = list(prompt)
    for _ in range(30):
        tokens.append(next_token(hash_tokens(tokens)))
    for place in range(1, 12):  # wherever the stop stands among the drafts
        stop = (tokens[5 + place],) if "ignore_eos" not in sampling else ()
        workload = replace(one_request(8, 5, 30, stop_token_ids=stop, **sampling), depth=depth)
        run = run_with_drafts(workload)
        if "min_tokens" not in sampling:  # what it is then, `check_run` knows
            assert run.reasons["r"] is (FinishReason.STOP if stop else FinishReason.LENGTH)


def test_spec_03_drafts_stay_within_what_is_allowed_and_displace_nobody() -> None:
    run = run_with_drafts(one_request(4, 58, 6))
    assert (len(run.completions["r"]), run.reasons["r"]) == (6, FinishReason.LENGTH)
    two = [Arrival(add_request(name, 14, 18), 0) for name in ("a", "bb")]
    tight = Workload(limits(max_model_len=64), 4, 16, 0, 1, two)
    run = run_with_drafts(tight)
    assert run.scheduler.stats().total_preemptions_recompute == 0


def test_a_request_that_does_not_want_drafts_gets_none() -> None:
    run = run_with_drafts(one_request(8, 5, 30, speculative=False))
    assert run.scheduler.stats().total_spec_drafts == 0
    assert run_with_drafts(one_request(8, 5, 30)).scheduler.stats().total_spec_drafts > 0


def test_a_request_for_a_form_gets_none() -> None:
    scheduler = make_scheduler()
    speculate(scheduler)
    executor = FakeExecutor(64, 4)
    scheduler.add(add_request("form", 4, 20, grammar=Grammar(text="start: /a+/")))
    scheduler.add(add_request("free", 4, 20))
    drafted = set()
    while scheduler.has_work():
        plan = scheduler.schedule()
        drafted |= {entry.request_id for entry in plan.scheduled if entry.num_samples > 1}
        scheduler.update(plan, executor.forward(plan).sample(None).wait())
    assert drafted == {"free"}


def test_a_draft_takes_no_block_that_a_running_request_may_need() -> None:
    seen: list[int] = []

    class Watching(KVCacheManager):
        def grow(self, request_id: str, num_tokens: int, **kwargs: Any) -> list[int] | None:
            added = super().grow(request_id, num_tokens, **kwargs)
            if kwargs.get("keep_free") and added:
                seen.append(self.num_blocks_free - kwargs["keep_free"])
            return added

    workload = random_workload(Random(5))
    run = build(workload, kv_type=Watching)
    speculate(run.scheduler)
    check_run(drive(run, workload.arrivals), workload)
    assert all(free >= 0 for free in seen)


def test_a_speculator_forgets_requests_that_are_over() -> None:
    run = run_with_drafts(one_request(8, 5, 30))
    found = run.scheduler._speculator
    assert found is not None
    assert (found._num_matched, found._acceptance._of_each) == ({}, {})
