"""The scheduler's door: requests come in, a step's plan goes out, its result comes back.

One rule, no phases: a step gives each request some tokens so that its computed tokens catch up with
its known ones; a decode is a request that lacks one. What is behind the door, in reading order:
step_planner (the passes), admission, preemption with victims and headroom, step_results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from serve.kv_cache.manager import KVCacheManager
from serve.messages import AddRequest, EngineStats, FinishReason, TokenDelta
from serve.scheduler.admission import Admission
from serve.scheduler.door import BackPressure, Deadlines, DrainRate, check_fits
from serve.scheduler.drafting.speculator import make_speculator
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.plan_builder import LaunchedSteps, PlanBuilder
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.pacing import PrefillDelay, TokenBudget
from serve.scheduler.policy.service_order import ServiceOrder
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.policy.victims import Victims
from serve.scheduler.preemption import Preemption
from serve.scheduler.request import Request, make_request
from serve.scheduler.roster import Roster
from serve.scheduler.step_planner import StepPlanner
from serve.scheduler.step_results import StepResults
from serve.scheduler.totals import Totals
from serve.scheduler.view import SchedulerView
from serve.speculative_config import SpeculativeConfig


class Scheduler:
    """Owns every Request. Each non-empty plan must come back through `update` or `fail`, in order.

    Several plans may be out at once: counters advance when a plan is made, not when it has run.
    `limits` are those of the next step; each plan carries the ones it was made with.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.num_rows = limits.max_num_seqs  # what the worker has; a lower limit displaces nobody
        self.clock = clock
        self.roster = Roster(long_above=limits.max_share)
        self.headroom = Headroom(kv.num_blocks)
        self._launched = LaunchedSteps()
        self._totals = Totals()
        self._speculator = (
            None if speculation is None else make_speculator(speculation, kv, self._totals)
        )
        self._order = ServiceOrder(limits)
        self._costs = StepCosts()
        self._set_pace(limits)
        self._rate = DrainRate()
        self._back_pressure = BackPressure(limits, self._rate)
        self._deadlines = Deadlines(limits.max_queue_time_s)
        self._admission = Admission(
            kv,
            self.roster,
            self._launched,
            self._order,
            self.headroom,
            self._costs,
            self._totals,
        )
        victims = Victims(kv, self._costs, self.headroom)
        preemption = Preemption(kv, self.roster, victims, self._admission, self._totals)
        self._planner = StepPlanner(self.roster, self._admission, preemption, self.headroom)
        self._results = StepResults(
            kv,
            self.roster,
            self._launched,
            self._costs,
            self._totals,
            preemption,
            self._end,
            self._speculator,
        )

    # ------------------------------------------------------------------ requests come and go

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises RequestError for one that can never run, or not be queued now."""
        check_fits(message, self.limits, self.kv.num_blocks * self.kv.block_size)
        if message.told is None:  # a moved stream has been let in before
            self._back_pressure.check(
                len(message.prompt_token_ids),
                num_waiting=len(self.roster.waiting),
                num_swapped=len(self.roster.swapped),
                num_tokens=self.roster.waiting.num_tokens,
                num_rows=self.limits.max_num_seqs - len(self.roster.running),
                now=self.clock(),
            )
        priority = message.priority if self.limits.policy == "priority" else 0
        order = self._order.place(message)
        extras = self.kv.prompt_regimes.extras(len(message.prompt_token_ids))
        request = make_request(message, order, self.kv.block_size, priority=priority, **extras)
        self.roster.join(request)
        self._deadlines.add(request)

    def expire(self) -> list[TokenDelta]:
        """End requests that have waited too long for their first step, and pins of old."""
        now = self.clock()
        if self.kv.prefixes.pins.by_id:
            self.kv.prefixes.unpin_expired(now)
        if not self._deadlines.entries:
            return []
        deltas = [self._time_out(request, now) for request in self._deadlines.take_expired(now)]
        self._deadlines.sweep(len(self.roster.waiting))
        return deltas

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they are, with no delta. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self.roster.requests.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ABORT)
        self.roster.drop_ended()

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Other limits from the next step on. Nobody who is queued or runs loses a place, and a
        deadline that a request has keeps holding."""
        self.limits = limits
        self.roster.waiting.set_long_above(limits.max_share)
        self._set_pace(limits)
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

    # ------------------------------------------------------------------ steps

    def schedule(self) -> SchedulerOutput:
        """The next step's plan; empty when nothing can or need be done before another retires."""
        now = self.clock()
        budget = self.limits.max_num_batched_tokens
        if self._budget is not None:
            budget = self._budget.tokens(self.roster.running)
        released = self.roster.take_released()
        plan = PlanBuilder(self._launched.next_number, self.limits, released, budget)
        self._planner.fill(plan, self._delay, now)
        if self._speculator is not None:
            self._speculator.add_drafts(plan)
        self._rate.note_step(
            now, num_admitted=len(plan.admitted), num_queued=self.roster.num_queued
        )
        output = plan.build()
        if output:
            self._launched.launch(output, plan, now)
        return output

    def update(
        self, plan: SchedulerOutput, result: StepResult, over: Collection[str] = ()
    ) -> list[TokenDelta]:
        """Append the tokens of the oldest step still out; end and free what has finished. `over`:
        requests that are complete with these tokens, whatever else they ask."""
        return self._results.take_in(plan, result, self.clock(), over)

    def fail(self, plan: SchedulerOutput, reason: str) -> list[TokenDelta]:
        """End the requests of a step that raised; nothing it should have written is used again."""
        return self._results.fail(plan, reason, self.clock())

    def _set_pace(self, limits: SchedulerLimits) -> None:
        """What slows prompts down, where it was asked for."""
        self._delay = PrefillDelay(limits.delay_factor) if limits.delay_factor else None
        has_target = limits.target_itl_s is not None
        self._budget = TokenBudget(self._costs, limits) if has_target else None

    def _time_out(self, request: Request, now: float) -> TokenDelta:
        """End a request that has waited too long; what its sender is told."""
        is_own = self._deadlines.is_own(request)
        limit = "its timeout" if is_own else "the server's --max-queue-time"
        retry_after_s = (
            None if is_own else self._back_pressure.retry_after_s(self.roster.num_queued, now)
        )
        self._end(request, FinishReason.TIMEOUT)
        return TokenDelta(
            request.request_id,
            [],
            finish_reason=FinishReason.TIMEOUT,
            error=f"the request waited {now - request.arrival_time:.1f} s for its first step, "
            f"longer than {limit} allows.",
            times=request.times(now),
            retry_after_s=retry_after_s,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Free all of a request's blocks. Callers then `roster.drop_ended`."""
        self.roster.end(request, reason)
        self._order.ended(request)
        if self._speculator is not None:
            self._speculator.ended(request)
        self.kv.free(request.request_id)

    # ------------------------------------------------------------------ looking in

    def view(self) -> SchedulerView:
        """For others to look in, without changing anything."""
        return SchedulerView(
            self.limits,
            self.clock,
            self.roster.requests,
            self.kv,
            self.roster,
            self._admission,
            self._rate,
        )

    def stats(self) -> EngineStats:
        """The state now, the totals, and the sizes of steps retired since the last call."""
        return self._totals.stats(
            self.kv,
            num_running=len(self.roster.running),
            num_waiting=len(self.roster.waiting),
            num_swapped=len(self.roster.swapped),
        )
