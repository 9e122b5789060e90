"""A test of the tests: known mistakes, put in one at a time, must not survive the property test."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.block_pool import BlockPool
from serve.kv_cache.block_table import BlockTable
from serve.kv_cache.manager import KVCacheManager
from serve.kv_cache.pins import Pin, PrefixPins
from serve.kv_cache.prefix_cache import PrefixCache
from serve.kv_cache.prefix_index import BlockHashes
from serve.messages import AddRequest, FinishReason, TokenDelta
from serve.scheduler.admission import Admission
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.service_order import ServiceOrder
from serve.scheduler.preemption import Preemption
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.roster import Roster
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_planner import StepPlanner
from tests.fair_prefill import check_prefill_is_fair
from tests.fakes import FakeExecutor
from tests.starvation import check_nobody_starves
from tests.strategies import build, check_run, drive, random_workload

ROLES: dict[type[Any], str] = {
    KVCacheManager: "kv_type",
    Scheduler: "scheduler_type",
    FakeExecutor: "executor_type",
}
SEEDED: dict[str, type[Any]] = {}


def seeded(bug: type[Any]) -> type[Any]:
    """Register a class with a mistake in it; its base says what it stands in for: a role above, or
    a part that Scheduler or KVCacheManager makes."""
    SEEDED[bug.__name__] = bug
    return bug


@seeded
class HandsOutTheNullBlock(KVCacheManager):
    def __init__(self, num_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_blocks, *args, **kwargs)
        self._device = BlockPool(num_blocks, first_id=0)


@seeded
class LeaksHostBlocks(KVCacheManager):
    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._drop(table)


@seeded
class CoversOneTokenTooFew(KVCacheManager):
    def grow(self, request_id: str, num_tokens: int, **kwargs: Any) -> list[int] | None:
        return super().grow(request_id, max(1, num_tokens - 1), **kwargs)


@seeded
class FreesBlocksThatAreStillHeld(KVCacheManager):
    def swap_out(self, request_id: str, num_tokens: int) -> list[BlockCopy] | None:
        copies = super().swap_out(request_id, num_tokens)
        if copies:
            self._host.drop([copies[-1].dst])
        return copies


@seeded
class ForgetsTheLastBlockOfASwap(KVCacheManager):
    def swap_out(self, request_id: str, num_tokens: int) -> list[BlockCopy] | None:
        copies = super().swap_out(request_id, num_tokens)
        return copies[:-1] if copies and len(copies) > 1 else copies


@seeded
class GivesAwayTheLiveTable(KVCacheManager):
    def block_ids(self, request_id: str) -> list[int]:
        return self._tables[request_id].block_ids


@seeded
class LeavesEvictedBlocksInThePrefixIndex(KVCacheManager):
    def _take(self, count: int, keep_free: int) -> list[int] | None:
        return None if count + keep_free > self._device.num_free else self._device.take(count)


@seeded
class DoesNotHoldMatchedBlocks(KVCacheManager):
    def _start_table(
        self, request_id: str, num_tokens: int, matched: Sequence[int], keep_free: int
    ) -> list[int] | None:
        added = super()._start_table(request_id, num_tokens, matched, keep_free)
        if added is not None:
            self._device.drop(matched, keep=self.prefixes)
        return added


@seeded
class CopiesSwappedBlocksAfterTheForward(FakeExecutor):
    def _run(self, number: int, plan: SchedulerOutput) -> StepResult:
        for request_id in plan.released:
            self.rows.pop(request_id, None)
        self._admit(plan)
        result = self._forward(plan)
        self._copy_blocks(plan)
        return result


@seeded
class ReadmitsAVictimInFlight(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launched.include = lambda request: False  # type: ignore[method-assign]


@seeded
class SwapsOutAndInInOneStep(StepPlanner):
    def _continue_running(self, plan: PlanBuilder) -> None:
        super()._continue_running(plan)
        plan.preempted = []
        self._headroom.blocks = lambda *args: 0  # type: ignore[method-assign]


@seeded
class EqualsDisplaceEachOther(Preemption):
    """Ties broken by arrival: the older of two equal requests pushes the younger out."""

    def make_way_for_urgent(self, plan: PlanBuilder) -> None:
        if self._admission.next_in_line(plan) is not None and self._roster.running:
            self._preempt(self._roster.running[-1], plan)


@seeded
class EvictsTheEldest(Preemption):
    def _preempt(self, victim: Request, plan: PlanBuilder) -> None:
        super()._preempt(self._roster.running[0], plan)


@seeded
class KeepsTheVictimsRow(Preemption):
    def _preempt(self, victim: Request, plan: PlanBuilder) -> None:
        super()._preempt(victim, plan)
        plan.released.remove(victim.request_id)


@seeded
class ForgetsSampledTokensOnRecompute(Preemption):
    def recompute_later(self, request: Request) -> None:
        del request.token_ids[request.num_prompt_tokens :]
        request.num_tokens = request.num_prompt_tokens
        super().recompute_later(request)


@seeded
class BelievesARecomputedRequestIsComputed(Preemption):
    def recompute_later(self, request: Request) -> None:
        computed = request.num_computed_tokens
        super().recompute_later(request)
        request.num_computed_tokens = computed


@seeded
class IndexesBlocksBeforeTheyAreComputed(Admission):
    def _give_row(self, request: Request, plan: PlanBuilder, now: float) -> None:
        super()._give_row(request, plan, now)
        request.block_hashes.extend(request.token_ids)
        self._kv.commit(request.request_id, request.block_hashes, request.num_tokens - 1)


@seeded
class MatchesTheLastTokenToo(Admission):
    def _match_prefix(self, request: Request) -> list[int]:
        super()._match_prefix(request)
        return self._kv.match_prefix(request.block_hashes, request.num_tokens)


@seeded
class MatchesUnscoredPrompts(Admission):
    def _match_prefix(self, request: Request) -> list[int]:
        super()._match_prefix(request)
        return self._kv.match_prefix(request.block_hashes, request.num_tokens - 1)


@seeded
class KeepsBlocksOfTheAborted(Scheduler):
    def _end(self, request: Request, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT and request.status is not RequestStatus.RUNNING:
            self.roster.end(request, reason)
        else:
            super()._end(request, reason)


@seeded
class TellsPromptLogprobsAgain(Preemption):
    def recompute_later(self, request: Request) -> None:
        super().recompute_later(request)
        request.num_prompt_logprobs_sent = 0


@seeded
class CountsPromptTokensAgain(Preemption):
    def recompute_later(self, request: Request) -> None:
        super().recompute_later(request)
        request.num_prompt_tokens_counted = 0


@seeded
class LetsTheYoungDisplaceTheAged(Preemption):
    """Whoever has the lower number pushes out everyone behind it, place in the order or not."""

    def make_way_for_urgent(self, plan: PlanBuilder) -> None:
        urgent = self._admission.next_in_line(plan)
        if urgent is not None:
            for victim in self._roster.running[::-1]:
                if victim.order > urgent.order:
                    self._preempt(victim, plan)


@seeded
class PlacesTwiceWithPromptsFirst(StepPlanner):
    def _continue_prompts(self, plan: PlanBuilder) -> None:
        super()._continue_prompts(plan)
        for entry, request in zip(plan.scheduled[:1], plan.requests[:1], strict=True):
            plan.place(request, min(entry.num_tokens, plan.tokens_left), [])


@seeded
class ExpiresTheBegun(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        waiting = RequestStatus.WAITING
        self._deadlines.may_expire = lambda r: r.status is waiting  # type: ignore[method-assign]


@seeded
class OverrunsTheBudget(StepPlanner):
    def _continue_running(self, plan: PlanBuilder) -> None:
        super()._continue_running(plan)
        plan.tokens_left += len(plan.scheduled)


@seeded
class TakesInTokensOfTheEnded(Scheduler):
    def update(self, plan: SchedulerOutput, result: StepResult) -> list[TokenDelta]:
        requests = self._launched._steps[0].requests
        late = [
            TokenDelta(entry.request_id, result.token_ids[entry.request_id])
            for entry, request in zip(plan.scheduled, requests, strict=True)
            if request.status is RequestStatus.FINISHED and entry.num_samples
        ]
        return super().update(plan, result) + late


@seeded
class PinsOnlyWhatIsThere(PrefixCache):
    def commit(self, table: BlockTable, hashes: BlockHashes, num_tokens: int) -> None:
        pins, self.pins = self.pins, PrefixPins(0)
        super().commit(table, hashes, num_tokens)
        self.pins = pins


@seeded
class PinsNothing(PrefixCache):
    def pin(self, pin: Pin) -> bool:
        if self.pins.num_blocks + self.pins.num_new(pin.hashes) > self.pins.max_blocks:
            return False
        self.pins.put(pin)
        return True


@seeded
class ForgetsWhatIsPinned(PrefixCache):
    def forget(self) -> int:
        self._index.keep_only(())
        return 0


@seeded
class UnpinsWhatOthersStillPin(PrefixCache):
    def unpin(self, pin_id: str) -> bool:
        pin = self.pins.by_id.get(pin_id)
        known = super().unpin(pin_id)
        for value in pin.hashes if pin is not None else ():
            block_id = self._index.block_of(value)
            if block_id in self._device.pinned:
                self._device.unpin(block_id)
        return known


@seeded
class HoldsBackTheLastToo(Headroom):
    """A watermark that nobody is let below, even when nothing runs."""

    def blocks(self, request: Request, num_running: int, limits: SchedulerLimits) -> int:
        return super().blocks(request, max(1, num_running), limits)


@seeded
class NeverAges(ServiceOrder):
    def _priority_level(self, message: AddRequest) -> int:
        return message.priority


@seeded
class AgesTheYoung(ServiceOrder):
    def _priority_level(self, message: AddRequest) -> int:
        return 2 * message.priority - super()._priority_level(message)


@seeded
class ChargesNobody(ServiceOrder):
    """Fair queueing that forgets what a client has had."""

    def _virtual_start(self, message: AddRequest) -> float:
        super()._virtual_start(message)
        return self._virtual_time - self._num_arrived


@seeded
class LetsNobodyPass(Admission):
    def next_in_line(self, plan: PlanBuilder) -> Request | None:
        return None if plan.begun is not None else super().next_in_line(plan)


@seeded
class LetsOnlyTheNextInLinePass(Roster):
    """A long prompt that waits keeps those behind it from passing the one that has begun."""

    def next_shorter(self, first: Request, most: int) -> Request | None:
        return None


@seeded
class LetsEverybodyPass(Admission):
    def passes(self, request: Request, begun: Request) -> bool:
        return True


@seeded
class KeepsNothingForTheBegun(PlanBuilder):
    def keep_for(self, request: Request, room: int) -> None:
        super().keep_for(request, min(room, 2))


@seeded
class KeepsForTheFirst(StepPlanner):
    """And not for the longest: more urgent ones that have begun take all that they need."""

    def _place_prompts(self, prompts: list[Request], room: int, plan: PlanBuilder) -> None:
        for request in prompts:
            plan.keep_for(request, room)
            plan.place_prompt(request)


@seeded
class GivesAwayWhatIsLeft(PlanBuilder):
    def place_begun(self) -> None:
        self.tokens_left = 0
        super().place_begun()


@seeded
class StopsTheStreamsThatPassed(StepPlanner):
    """The first prompt takes all of a step, and the decodes after it in the order wait."""

    def _continue_running(self, plan: PlanBuilder) -> None:
        for first in self._roster.running[:1]:
            if first.num_uncomputed_tokens > 1:
                plan.place(first, plan.share_of(first.num_uncomputed_tokens), [])
        super()._continue_running(plan)


def run_the_suite(**types: type[Any]) -> None:
    """What test_core checks of its random workloads, on workloads from fixed seeds."""
    for seed in range(3000):
        workload = random_workload(Random(seed))
        check_run(drive(build(workload, **types), workload.arrivals), workload)
        if seed % 10 == 0:
            check_nobody_starves(Random(seed), **types)
        if seed % 10 == 0 and types.keys() <= {"scheduler_type"}:
            check_prefill_is_fair(Random(seed), **types)


@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mistaken = SEEDED[bug]
    original: type[Any] = mistaken.__base__
    types = {ROLES[original]: mistaken} if original in ROLES else {}
    if not types:
        maker = "kv_cache.manager" if original is PrefixCache else "scheduler.scheduler"
        monkeypatch.setattr(f"serve.{maker}.{original.__name__}", mistaken)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever breaks first
        run_the_suite(**types)
