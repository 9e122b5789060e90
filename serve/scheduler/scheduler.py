"""What runs in the next step, and what a step's tokens mean for the requests in it.

One rule, no phases: a step gives each request some tokens so that its computed tokens catch up with
its known ones; a decode is a request that lacks one. `running` is kept in the order of service, so
room is given from the front and taken from the back: the oldest running request always advances.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from serve.kv_cache.manager import KVCacheManager
from serve.messages import AddRequest, EngineStats, FinishReason, TokenDelta
from serve.scheduler.back_pressure import BackPressure
from serve.scheduler.deadlines import Deadlines
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.launched import LaunchedSteps
from serve.scheduler.limits import SchedulerLimits, check_fits
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput, StepResult
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.preemption import Preemption, PreemptionMode
from serve.scheduler.prefill_delay import PrefillDelay
from serve.scheduler.progress import count_prompt_tokens, describe_gain
from serve.scheduler.request import Request, RequestStatus, make_request
from serve.scheduler.roster import Roster
from serve.scheduler.service_order import ServiceOrder
from serve.scheduler.step_costs import StepCosts
from serve.scheduler.stopping import append_until_end
from serve.scheduler.token_budget import TokenBudget
from serve.scheduler.totals import Totals

logger = logging.getLogger(__name__)

RUNNING, WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
SWAPPED, FINISHED = RequestStatus.SWAPPED, RequestStatus.FINISHED


class Scheduler:
    """Owns every Request. Each non-empty plan must come back through `update` or `fail`, in order.

    Several plans may be out at once: counters advance when a plan is made, not when it has run.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.clock = clock
        self.roster = Roster(long_above=limits.max_share)
        self._launched = LaunchedSteps()
        self._totals = Totals()
        self._order = ServiceOrder(limits)
        self._costs = StepCosts()
        self._preemption = Preemption(kv, self._costs, limits)
        self._delay = PrefillDelay(limits.delay_factor)
        self._budget = TokenBudget(self._costs, limits)
        self._back_pressure = BackPressure(limits)
        self._deadlines = Deadlines(limits.max_queue_time_s)

    # ------------------------------------------------------------------ requests come and go

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestError for one that can never run, or not be queued now."""
        check_fits(message, self.limits, self.kv.num_blocks * self.kv.block_size)
        self._back_pressure.check(
            len(message.prompt_token_ids),
            num_waiting=len(self.roster.waiting),
            num_tokens=self.roster.waiting.num_tokens,
            num_rows=self.limits.max_num_seqs - len(self.roster.running),
            now=self.clock(),
        )
        priority = message.priority if self.limits.policy == "priority" else 0
        order = self._order.place(message)
        request = make_request(message, order, self.kv.block_size, priority=priority)
        self.roster.join(request)
        self._deadlines.add(request)

    def expire(self) -> list[TokenDelta]:
        """End requests that have waited too long for their first step."""
        now = self.clock()
        expired = self._deadlines.take_expired(now)
        retry_after_s = self._back_pressure.seconds_until_drained(len(self.roster.waiting), now)
        deltas = []
        for request in expired:
            is_own = self._deadlines.is_own(request)
            limit = "its timeout" if is_own else "the server's --max-queue-time"
            self._end(request, FinishReason.TIMEOUT)
            deltas.append(
                TokenDelta(
                    request.request_id,
                    [],
                    finish_reason=FinishReason.TIMEOUT,
                    error=f"the request waited {now - request.arrival_time:.1f} s for its first "
                    f"step, longer than {limit} allows.",
                    times=request.times(now),
                    retry_after_s=None if is_own else retry_after_s,
                )
            )
        self._deadlines.sweep(len(self.roster.waiting))
        return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are, with no delta. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self.roster.requests.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ABORT)
        self.roster.drop_ended()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what runs goes on with the blocks it has."""
        self.kv.forget_prefixes()

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Other limits from the next step on. Nobody who is queued or runs loses a place, and a
        deadline that a request has keeps holding."""
        self.limits = limits
        self.roster.waiting.set_long_above(limits.max_share)
        self._preemption = Preemption(self.kv, self._costs, limits)
        self._delay = PrefillDelay(limits.delay_factor)
        self._budget = TokenBudget(self._costs, limits)
        self._order.set_limits(limits)
        self._back_pressure.set_limits(limits)

    def rows_free_after(self) -> list[str] | None:
        """Rows to give back so that one is free; None when live requests hold them all. For use
        while no step is out; they stay to be given back."""
        if len(self.roster.running) >= self.limits.max_num_seqs:
            return None
        return self.roster.rows_to_release()

    def has_work(self) -> bool:
        """Whether `schedule` may have something to say."""
        return bool(self.roster.requests) or self.roster.has_released()

    # ------------------------------------------------------------------ making a step

    def schedule(self) -> SchedulerOutput:
        """The next step's plan; empty when nothing can or need be done before another retires."""
        now = self.clock()
        released = self.roster.take_released()
        budget = self._budget.tokens(self.roster.running)
        plan = PlanBuilder(self._launched.next_number, self.limits, released, budget)
        self._delay.begin_step(now)
        may_start = self._delay.allows(
            now, self.roster.waiting.earliest_arrival(), len(self.roster.running)
        )
        if self.limits.policy == "priority" and may_start:
            self._make_way_for_urgent(plan)
        if self.limits.step_order == "prefill-first" and not plan.preempted:
            self._continue_prompts(plan)
            self._schedule_queued(plan, now, may_start)
        if not plan.scheduled:
            self._schedule_running(plan)
        if not plan.preempted:  # what was just evicted must not come back in the same step
            self._schedule_queued(plan, now, may_start)
        self._delay.end_step(plan.has_prompt or plan.num_tokens > len(plan.scheduled))
        self._preemption.watermark.note_step(preempted=bool(plan.preempted))
        output = plan.build()
        if output:
            self._launched.launch(output, plan, now)
        return output

    def _continue_prompts(self, plan: PlanBuilder) -> None:
        """Of those that run, the ones that were begun and not finished; they have their blocks."""
        for request in self.roster.running:
            num_tokens = plan.share_of(request.num_uncomputed_tokens)
            end = request.num_computed_tokens + num_tokens
            if request.num_uncomputed_tokens > 1 and num_tokens and end <= request.num_slots:
                plan.place(request, num_tokens, [])

    def _schedule_running(self, plan: PlanBuilder) -> None:
        running = self.roster.running  # preemption shortens it at the far end only
        index = 0
        while plan.tokens_left and (index := plan.place_decodes(running, index)) < len(running):
            request = running[index]
            num_tokens = plan.share_of(request.num_uncomputed_tokens)
            if num_tokens > 0:
                new_block_ids: list[int] | None = []
                if request.num_computed_tokens + num_tokens > request.num_slots:
                    new_block_ids = self._make_room(request, num_tokens, plan)
                if new_block_ids is None:
                    return
                plan.place(request, num_tokens, new_block_ids)
            index += 1

    def _schedule_queued(self, plan: PlanBuilder, now: float, may_start: bool) -> None:
        """Admit while there is budget, a row and room. Nobody overtakes the next in line."""
        while plan.tokens_left and len(self.roster.running) < self.limits.max_num_seqs:
            request = self.roster.next_in_line(may_start_long=plan.may_start_long())
            if request is None or self._launched.name(request):
                return  # while its last step is out, its tokens are not all known
            if request.status is SWAPPED:
                admitted = self._swap_in(request, plan)
            else:
                admitted = may_start and self._start(request, plan)
            if not admitted:
                return
            self._admit(request, plan, now)

    def _swap_in(self, request: Request, plan: PlanBuilder) -> bool:
        """Bring a request's KV back if there is room."""
        if not plan.may_start(request, request.num_uncomputed_tokens):
            return False
        copies = self.kv.swap_in(
            request.request_id, request.num_tokens, keep_free=self._headroom(request)
        )
        if copies is None:
            return False
        plan.swap_in += copies
        self._totals.blocks_swapped += len(copies)
        return True

    def _start(self, request: Request, plan: PlanBuilder) -> bool:
        """Give a waiting request its blocks if there is room."""
        matched = self._match_prefix(request)
        num_matched_tokens = len(matched) * self.kv.block_size
        if not plan.may_start(request, request.num_uncomputed_tokens - num_matched_tokens):
            return False
        # Blocks for all known tokens, however few run now: a prompt that was begun must not find
        # the pool full half way.
        room = self.kv.grow(
            request.request_id,
            request.num_tokens,
            matched=matched,
            keep_free=self._headroom(request),
        )
        if room is None:
            return False
        self._start_at(request, num_matched_tokens)
        plan.has_prompt = True
        return True

    def _match_prefix(self, request: Request) -> list[int]:
        if not self.kv.enable_prefix_caching:
            return []
        request.block_hashes.extend(request.token_ids)
        return self.kv.match_prefix(request.block_hashes, request.num_matchable_tokens)

    def _start_at(self, request: Request, num_matched_tokens: int) -> None:
        """Take the tokens found in the prefix cache for computed."""
        request.num_computed_tokens = num_matched_tokens
        request.next_commit = num_matched_tokens + self.kv.block_size
        if request.first_scheduled_time is None and self.kv.enable_prefix_caching:
            request.num_cached_tokens = num_matched_tokens
            self._totals.prefix_cache_queries += request.num_tokens
            self._totals.prefix_cache_hits += num_matched_tokens

    def _admit(self, request: Request, plan: PlanBuilder, now: float) -> None:
        """Give a row to a request that has its blocks, and its first tokens."""
        self.roster.admit(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            self._back_pressure.note_start(now)
            self._order.started(request)
        block_ids = self.kv.block_ids(request.request_id)
        plan.admitted.append(
            RowData(
                request_id=request.request_id,
                sampling=request.sampling,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=block_ids,
            )
        )
        request.num_slots = len(block_ids) * self.kv.block_size
        plan.place(request, plan.share_of(request.num_uncomputed_tokens), [])

    # ------------------------------------------------------------------ room

    def _make_room(self, request: Request, num_tokens: int, plan: PlanBuilder) -> list[int] | None:
        """Blocks for a running request's next tokens, at the expense of those after it.

        Nobody before it gives way, so none that is already in the plan, and the eldest advances.
        None when the request itself was the last, and was preempted.
        """
        wanted = request.num_computed_tokens + num_tokens
        while (new_block_ids := self.kv.grow(request.request_id, wanted)) is None:
            later = self.roster.running[self.roster.running.index(request) + 1 :]
            victim = self._preemption.choose_victim(later) if later else request
            self._preempt(victim, plan)
            if victim is request:
                return None
        request.num_slots += len(new_block_ids) * self.kv.block_size
        return new_block_ids

    def _make_way_for_urgent(self, plan: PlanBuilder) -> None:
        """Preempt running requests for a more urgent one that finds no row or room.

        It is admitted in the next step. Equal priorities never displace each other. Comes before
        anything is placed, so that no victim is in the plan.
        """
        urgent = self.roster.next_in_line(may_start_long=plan.may_start_long())
        if urgent is None or self._launched.name(urgent):
            return
        for victim in self._preemption.victims_for(urgent, self.roster.running):
            if len(self.roster.running) < self.limits.max_num_seqs and self._lacks(urgent) <= 0:
                return
            self._preempt(victim, plan)

    def _lacks(self, request: Request) -> int:
        """Blocks that must become free before a queued request can be admitted; 0 or less: none."""
        return self.num_blocks_needed(request) - self.kv.num_blocks_free

    def _preempt(self, victim: Request, plan: PlanBuilder) -> None:
        plan.released.append(victim.request_id)
        plan.preempted.append(victim)
        victim.num_preemptions += 1
        victim.owes_times = True
        mode = self._preemption.choose_mode(victim)
        self._totals.preemptions[mode] += 1
        free_before, num_tokens = self.kv.num_blocks_free, victim.num_computed_tokens
        if mode is PreemptionMode.SWAP:
            copies = self.kv.swap_out(victim.request_id, num_tokens)
            assert copies is not None, "choose_mode saw room on the host"
            plan.swap_out += copies
            self._totals.blocks_swapped += len(copies)
            self.roster.queue(victim, SWAPPED)
        else:
            self._totals.tokens_to_recompute += num_tokens
            self._requeue_for_recompute(victim)
        logger.info(
            "preempted %s by %s: %d computed tokens, %d → %d free blocks, its preemption no. %d",
            victim.request_id,
            mode.name.lower(),
            num_tokens,
            free_before,
            self.kv.num_blocks_free,
            victim.num_preemptions,
        )

    def _requeue_for_recompute(self, request: Request) -> None:
        self.kv.free(request.request_id)
        request.num_computed_tokens = 0
        self.roster.queue(request, WAITING)

    def _headroom(self, request: Request) -> int:
        return self._preemption.headroom(request, len(self.roster.running))

    # ------------------------------------------------------------------ taking in a step's result

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[TokenDelta]:
        """Append the tokens of the oldest step still out; end and free what has finished."""
        now = self.clock()
        step = self._launched.retire(plan, now)
        if plan.scheduled:
            self._costs.observe(plan, self._launched.last_duration_s)
            self._totals.step_tokens.append(plan.num_scheduled_tokens)
        deltas: list[TokenDelta] = []
        num_generated = 0
        tells_logprobs = bool(result.logprobs or result.prompt_logprobs)
        for entry, request in zip(plan.scheduled, step.requests, strict=True):
            if request.status is FINISHED:  # ended while the step was out
                continue
            request_id, start, num_tokens, _, _, samples = entry
            if start < request.num_prompt_tokens:
                self._totals.prompt_tokens += count_prompt_tokens(entry, request)
            if start + num_tokens >= request.next_commit:
                self._commit(entry, request)
            reason = None
            if samples:
                token_ids = result.token_ids[request_id]
                reason = append_until_end(request, token_ids)
                if reason is None and not (tells_logprobs or request.owes_times):
                    deltas.append(TokenDelta(request_id, token_ids))  # nearly every one is this
                    num_generated += len(token_ids)
                    continue
            delta = describe_gain(entry, request, result, reason, now)
            if delta is not None:
                deltas.append(delta)
                num_generated += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._end(request, delta.finish_reason)
        self._totals.generation_tokens += num_generated
        self.roster.drop_ended()
        return deltas

    def _commit(self, entry: ScheduledRequest, request: Request) -> None:
        """Blocks that this step has filled may be found by others from now on."""
        computed = entry.start + entry.num_tokens
        request.next_commit = (computed // self.kv.block_size + 1) * self.kv.block_size
        if self.kv.enable_prefix_caching and request.status is RUNNING:
            request.block_hashes.extend(request.token_ids)
            self.kv.commit(request.request_id, request.block_hashes, computed)

    def fail(self, plan: SchedulerOutput, reason: str) -> list[TokenDelta]:
        """End the requests of a step that raised; nothing it should have written is used again."""
        now = self.clock()
        step = self._launched.retire(plan, now)
        self.roster.release_again(plan.released)
        failed = step.requests + [r for r in step.preempted if self._lost_its_copy(r)]
        deltas = []
        for request in failed:
            if request.status is not FINISHED:
                self._end(request, FinishReason.ERROR)
                deltas.append(
                    TokenDelta(
                        request.request_id,
                        [],
                        finish_reason=FinishReason.ERROR,
                        error=reason,
                        times=request.times(now),
                    )
                )
        self.roster.drop_ended()
        return deltas

    def _lost_its_copy(self, victim: Request) -> bool:
        """Whether a failed step's victim must end, too. One still swapped out is recomputed."""
        if victim.status is SWAPPED and not self._launched.name(victim):
            self._requeue_for_recompute(victim)
            return False
        return victim.status is not WAITING

    # ------------------------------------------------------------------ ends

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free all of a request's blocks. Callers then `roster.drop_ended`."""
        self.roster.end(request, reason)
        self._order.ended(request)
        self.kv.free(request.request_id)

    # ------------------------------------------------------------------ looking in

    def num_blocks_needed(self, request: Request) -> int:
        """Blocks that must be free for a queued request to be admitted."""
        matched = self._match_prefix(request) if request.status is WAITING else []
        return self.kv.num_blocks_needed(request.num_tokens, matched) + self._headroom(request)

    def stats(self) -> EngineStats:
        """The state now, the totals, and the sizes of steps retired since the last call."""
        return self._totals.stats(
            self.kv,
            num_running=len(self.roster.running),
            num_waiting=len(self.roster.waiting),
            num_swapped=len(self.roster.swapped),
        )

    def check_invariants(self) -> None:
        """See invariants.py."""
        check_scheduler(self)
