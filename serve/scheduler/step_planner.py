"""The passes that fill a step: who runs in it, with how many tokens."""

from __future__ import annotations

from serve.scheduler.admission import Admission
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.prefill_delay import PrefillDelay
from serve.scheduler.preemption import Preemption
from serve.scheduler.roster import Roster


class StepPlanner:
    """Running requests come first, in order, and then queued ones; `prefill-first` turns it round.

    Room is given from the front of `running` and taken from its back: the eldest always advances.
    """

    def __init__(
        self, roster: Roster, admission: Admission, preemption: Preemption, headroom: Headroom
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._preemption = preemption
        self._headroom = headroom

    def fill(self, plan: PlanBuilder, delay: PrefillDelay, now: float) -> None:
        """Put into the plan what belongs there; rows and blocks are taken and given as it is."""
        delay.begin_step(now)
        may_start = delay.allows(
            now, self._roster.waiting.earliest_arrival(), len(self._roster.running)
        )
        if plan.limits.policy == "priority" and may_start:
            self._preemption.make_way_for_urgent(plan)
        if plan.limits.step_order == "prefill-first" and not plan.preempted:
            self._continue_prompts(plan)
            self._admission.admit_queued(plan, now, may_start)
        if not plan.scheduled:
            self._continue_running(plan)
        if not plan.preempted:  # what was just evicted must not come back in the same step
            self._admission.admit_queued(plan, now, may_start)
        delay.end_step(plan.has_prompt or plan.num_tokens > len(plan.scheduled))
        self._headroom.note_step(preempted=bool(plan.preempted))

    def _continue_prompts(self, plan: PlanBuilder) -> None:
        """Of those that run, the ones that were begun and not finished; they have their blocks."""
        for request in self._roster.running:
            num_tokens = plan.share_of(request.num_uncomputed_tokens)
            end = request.num_computed_tokens + num_tokens
            if request.num_uncomputed_tokens > 1 and num_tokens and end <= request.num_slots:
                plan.place(request, num_tokens, [])

    def _continue_running(self, plan: PlanBuilder) -> None:
        running = self._roster.running  # preemption shortens it at the far end only
        index = 0
        while plan.tokens_left and (index := plan.place_decodes(running, index)) < len(running):
            request = running[index]
            num_tokens = plan.share_of(request.num_uncomputed_tokens)
            if num_tokens > 0:
                new_block_ids: list[int] | None = []
                if request.num_computed_tokens + num_tokens > request.num_slots:
                    new_block_ids = self._preemption.make_room(request, num_tokens, plan)
                if new_block_ids is None:
                    return
                plan.place(request, num_tokens, new_block_ids)
            index += 1
