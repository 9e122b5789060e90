"""What runs in the next step, and what a step's tokens mean for the requests in it.

One rule, no phases: a step gives each request some tokens so that its computed tokens catch up with
its known ones; a decode is a request that lacks one. `running` is kept in the order of service, so
room is given from the front and taken from the back: the oldest running request always advances.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from serve.kv_cache.manager import KVCacheManager
from serve.messages import AddRequest, EngineStats, FinishReason, TokenDelta
from serve.scheduler.back_pressure import BackPressure
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.launched import LaunchedSteps
from serve.scheduler.limits import SchedulerLimits, check_fits
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput, StepResult
from serve.scheduler.plan_builder import PlanBuilder, within
from serve.scheduler.preemption import Preemption, PreemptionMode, headroom
from serve.scheduler.prefill_delay import PrefillDelay
from serve.scheduler.progress import apply_result, count_prompt_tokens
from serve.scheduler.queues import RequestQueue
from serve.scheduler.request import Request, RequestStatus, make_request
from serve.scheduler.step_costs import StepCosts
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
        self.requests: dict[str, Request] = {}  # all but finished ones
        self.waiting = RequestQueue(long_above=limits.max_share)
        self.swapped = RequestQueue()
        self.running: list[Request] = []  # by Request.order
        self._any_ended = False  # whether `running` still holds one that has ended
        self._launched = LaunchedSteps()
        self._released: list[str] = []  # rows to give back in the next plan
        self._totals = Totals()
        self._num_arrived = 0
        self._watermark = max(1, kv.num_blocks // 100)
        self._costs = StepCosts()
        self._preemption = Preemption(kv, self._costs, limits)
        self._delay = PrefillDelay(limits.delay_factor)
        self._back_pressure = BackPressure(limits)

    # ------------------------------------------------------------------ requests come and go

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestError for one that can never run, or not be queued now."""
        check_fits(message, self.limits, self.kv.num_blocks * self.kv.block_size)
        self._back_pressure.check(
            len(message.prompt_token_ids),
            num_waiting=len(self.waiting),
            num_tokens=self.waiting.num_tokens,
            num_rows=self.limits.max_num_seqs - len(self.running),
            now=self.clock(),
        )
        assert message.request_id not in self.requests, f"{message.request_id} is already here"
        priority = message.priority if self.limits.policy == "priority" else 0
        request = make_request(message, (priority, self._num_arrived), self.kv.block_size)
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are, with no delta. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ABORT)
        self._drop_ended_from_running()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; what runs goes on with the blocks it has."""
        self.kv.forget_prefixes()

    def has_work(self) -> bool:
        """Whether `schedule` may have something to say."""
        return bool(self.requests or self._released)

    # ------------------------------------------------------------------ making a step

    def schedule(self) -> SchedulerOutput:
        """The next step's plan; empty when nothing can or need be done before another retires."""
        now = self.clock()
        plan = PlanBuilder(self._launched.next_number, self.limits, self._released)
        self._released = []
        self._delay.begin_step(now)
        may_start = self._delay.allows(now, self.waiting.earliest_arrival(), len(self.running))
        if self.limits.policy == "priority" and may_start:
            self._make_way_for_urgent(plan)
        self._schedule_running(plan)
        if not plan.preempted:  # what was just evicted must not come back in the same step
            self._schedule_queued(plan, now, may_start)
        self._delay.end_step(plan.has_prompt or plan.num_tokens > len(plan.scheduled))
        output = plan.build()
        if output:
            self._launched.launch(output, plan, now)
        return output

    def _schedule_running(self, plan: PlanBuilder) -> None:
        for request in self.running:  # preemption shortens it at the far end only
            num_tokens = request.num_uncomputed_tokens
            if num_tokens > 1 or not plan.tokens_left:
                num_tokens = plan.share_of(num_tokens)
            if num_tokens == 0:
                continue
            if request.num_computed_tokens + num_tokens <= request.num_slots:
                plan.place(request, num_tokens, [])
            elif (new_block_ids := self._make_room(request, num_tokens, plan)) is not None:
                plan.place(request, num_tokens, new_block_ids)
            else:
                break

    def _schedule_queued(self, plan: PlanBuilder, now: float, may_start: bool) -> None:
        """Admit while there is budget, a row and room. Nobody overtakes the next in line."""
        while plan.tokens_left and len(self.running) < self.limits.max_num_seqs:
            request = self._next_in_line(plan)
            if request is None or self._launched.name(request):
                return  # while its last step is out, its tokens are not all known
            if request.status is SWAPPED:
                admitted = self._swap_in(request, plan)
            else:
                admitted = may_start and self._start(request, plan)
            if not admitted:
                return
            self._admit(request, plan, now)

    def _next_in_line(self, plan: PlanBuilder) -> Request | None:
        """Swapped-out requests go first, except before more urgent ones.

        Long prompts are passed over while as many as may be are partial.
        """
        swapped = self.swapped.peek()
        waiting = self.waiting.peek() if plan.may_start_long() else self.waiting.peek_short()
        if swapped is None or (waiting is not None and waiting.priority < swapped.priority):
            return waiting
        return swapped

    def _swap_in(self, request: Request, plan: PlanBuilder) -> bool:
        """Bring a request's KV back if there is room."""
        if not plan.may_start(request, request.num_uncomputed_tokens):
            return False
        copies = self.kv.swap_in(
            request.request_id, request.num_tokens, keep_free=self._headroom(request)
        )
        if copies is None:
            return False
        self.swapped.remove(request)
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
        self.waiting.remove(request)
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
        request.status = RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            self._back_pressure.note_start(now)
        insort(self.running, request, key=attrgetter("order"))
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
            later = self.running[self.running.index(request) + 1 :]
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
        urgent = self._next_in_line(plan)
        if urgent is None or self._launched.name(urgent):
            return
        victims = [r for r in reversed(self.running) if r.priority > urgent.priority]
        if not victims or not self._would_help(urgent, victims):
            return
        for victim in victims:  # the tail of `running`, which is in order of priority
            if len(self.running) < self.limits.max_num_seqs and self._lacks(urgent) <= 0:
                return
            self._preempt(victim, plan)

    def _would_help(self, urgent: Request, victims: list[Request]) -> bool:
        """Whether the request could be admitted with all of the victims gone: none goes in vain."""
        num_staying = len(self.running) - len(victims)
        if num_staying >= self.limits.max_num_seqs or not self._may_be_partial_beside(num_staying):
            return False
        freed = self.kv.num_blocks_only_held_by([victim.request_id for victim in victims])
        room = headroom(urgent, num_staying, self._watermark)
        needed = self.kv.num_blocks_needed(urgent.num_tokens) + room
        return needed <= self.kv.num_blocks_free + freed

    def _may_be_partial_beside(self, num_staying: int) -> bool:
        """Whether the first of `running` leave room for another partial prefill, of any length."""
        limits = self.limits
        partial = [r for r in self.running[:num_staying] if r.num_uncomputed_tokens > 1]
        num_long = sum(r.num_tokens > limits.max_share for r in partial)
        return within(len(partial), limits.max_num_partial_prefills) and within(
            num_long, limits.max_long_partial_prefills
        )

    def _lacks(self, request: Request) -> int:
        """Blocks that must become free before a queued request can be admitted; 0 or less: none."""
        matched = self._match_prefix(request) if request.status is WAITING else []
        needed = self.kv.num_blocks_needed(request.num_tokens, matched) + self._headroom(request)
        return needed - self.kv.num_blocks_free

    def _preempt(self, victim: Request, plan: PlanBuilder) -> None:
        self.running.remove(victim)
        plan.released.append(victim.request_id)
        plan.preempted.append(victim)
        victim.num_preemptions += 1
        mode = self._preemption.choose_mode(victim)
        self._totals.preemptions[mode] += 1
        free_before, num_tokens = self.kv.num_blocks_free, victim.num_computed_tokens
        if mode is PreemptionMode.SWAP:
            copies = self.kv.swap_out(victim.request_id, num_tokens)
            assert copies is not None, "choose_mode saw room on the host"
            plan.swap_out += copies
            self._totals.blocks_swapped += len(copies)
            victim.status = SWAPPED
            self.swapped.push(victim)
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
        request.status = WAITING
        self.waiting.push(request)

    def _headroom(self, request: Request) -> int:
        return headroom(request, len(self.running), self._watermark)

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
        for entry, request in zip(plan.scheduled, step.requests, strict=True):
            if request.status is FINISHED:  # ended while the step was out
                continue
            if request.num_prompt_tokens_counted < request.num_prompt_tokens:
                self._totals.prompt_tokens += count_prompt_tokens(entry, request)
            if entry.start + entry.num_tokens >= request.next_commit:
                self._commit(entry, request)
            delta = apply_result(entry, request, result, now)
            if delta is not None:
                deltas.append(delta)
                num_generated += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._end(request, delta.finish_reason)
        self._totals.generation_tokens += num_generated
        self._drop_ended_from_running()
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
        # Rows the step should have given back may still be held; the worker ignores those that are
        # not. A request that has got a row since keeps it.
        self._released += [i for i in plan.released if not self._has_row(i)]
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
        self._drop_ended_from_running()
        return deltas

    def _has_row(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status is RUNNING

    def _lost_its_copy(self, victim: Request) -> bool:
        """Whether a failed step's victim must end, too. One still swapped out is recomputed."""
        if victim.status is SWAPPED and not self._launched.name(victim):
            self.swapped.remove(victim)
            self._requeue_for_recompute(victim)
            return False
        return victim.status is not WAITING

    # ------------------------------------------------------------------ ends

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free all of a request's blocks. Callers then `_drop_ended_from_running`."""
        if request.status is RUNNING:
            self._released.append(request.request_id)
            self._any_ended = True
        elif request.status is WAITING:
            self.waiting.remove(request)
        else:
            self.swapped.remove(request)
        request.status = FINISHED
        request.finish_reason = reason
        self.kv.free(request.request_id)
        del self.requests[request.request_id]

    def _drop_ended_from_running(self) -> None:
        if self._any_ended:
            self.running = [r for r in self.running if r.status is RUNNING]
            self._any_ended = False

    # ------------------------------------------------------------------ looking in

    def stats(self) -> EngineStats:
        """The state now, the totals, and the sizes of steps retired since the last call."""
        return self._totals.stats(
            self.kv,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_swapped=len(self.swapped),
        )

    def check_invariants(self) -> None:
        """See invariants.py."""
        check_scheduler(self)
