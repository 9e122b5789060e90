"""The passes that fill a step: who runs in it, with how many tokens."""

from __future__ import annotations

from operator import attrgetter

from serve.scheduler.admission import Admission
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.pacing import PrefillDelay
from serve.scheduler.preemption import Preemption
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.roster import Roster


class StepPlanner:
    """Running requests come first, in order, and then queued ones; `prefill-first` turns it round.

    Room is given from the front of `running` and taken from its back: the eldest always advances.
    Only decodes need any: a prompt gets the blocks of all its tokens when it is admitted.
    """

    def __init__(
        self, roster: Roster, admission: Admission, preemption: Preemption, headroom: Headroom
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._preemption = preemption
        self._headroom = headroom

    def fill(self, plan: PlanBuilder, delay: PrefillDelay | None, now: float) -> None:
        """Put into the plan what belongs there; rows and blocks are taken and given as it is."""
        may_start = delay is None or self._may_start(delay, now)
        if plan.limits.policy == "priority" and may_start:
            self._preemption.make_way_for_urgent(plan)
        if plan.limits.step_order == "prefill-first" and not plan.preempted:
            self._continue_prompts(plan)
            self._admit_queued(plan, now, may_start)
            plan.place_begun()
        if not plan.scheduled:
            self._continue_running(plan)
        if not plan.preempted:  # what was just evicted must not come back in the same step
            self._admit_queued(plan, now, may_start)
        plan.place_begun()
        if delay is not None:
            delay.end_step(plan.has_prompt)
        self._headroom.note_step(preempted=bool(plan.preempted))

    def _may_start(self, delay: PrefillDelay, now: float) -> bool:
        """Whether the delay lets waiting requests begin in this step."""
        delay.begin_step(now)
        earliest = self._roster.waiting.earliest_arrival()
        return delay.allows(now, earliest, len(self._roster.running))

    def _admit_queued(self, plan: PlanBuilder, now: float, may_start: bool) -> None:
        if self._roster.num_queued:
            self._admission.admit_queued(plan, now, may_start)

    def _continue_prompts(self, plan: PlanBuilder) -> None:
        """Of those that run, the ones that were begun and not finished; they have their blocks."""
        prompts = [r for r in self._roster.running if r.num_uncomputed_tokens > 1]
        if prompts:
            self._place_prompts(prompts, plan.tokens_left, plan)

    def _continue_running(self, plan: PlanBuilder) -> None:
        """Decodes, and then the prompts that were begun, in what is left of the step."""
        running = self._roster.running  # preemption shortens it at the far end only
        prompts: list[Request] = []
        room = 0
        index = plan.place_decodes(running, 0)
        while index < len(running) and plan.tokens_left:  # this one is no plain decode
            request = running[index]
            if request.num_uncomputed_tokens > 1:
                room = room or plan.tokens_left  # what the decodes before the first prompt leave
                prompts.append(request)
            elif request.num_uncomputed_tokens and not self._continue_decode(request, plan):
                break
            index = plan.place_decodes(running, index + 1)
        if plan.preempted:
            prompts = [r for r in prompts if r.status is RequestStatus.RUNNING]
        if prompts:
            self._place_prompts(prompts, room, plan)

    def _place_prompts(self, prompts: list[Request], room: int, plan: PlanBuilder) -> None:
        plan.keep_for(max(prompts, key=attrgetter("num_uncomputed_tokens")), room)
        for request in prompts:
            plan.place_prompt(request)

    def _continue_decode(self, request: Request, plan: PlanBuilder) -> bool:
        """False when there was no room for its token and it was preempted itself."""
        new_block_ids: list[int] | None = []
        if request.num_computed_tokens == request.num_slots:
            new_block_ids = self._preemption.make_room(request, 1, plan)
        if new_block_ids is None:
            return False
        plan.place(request, 1, new_block_ids)
        return True
