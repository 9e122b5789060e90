"""Taking blocks and rows from running requests, for their elders or for more urgent ones."""

from __future__ import annotations

import logging

from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.admission import Admission
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.policy.victims import PreemptionMode, Victims
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.roster import Roster
from serve.scheduler.totals import Totals

logger = logging.getLogger(__name__)


class Preemption:
    """Acts on what `Victims` decides."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        victims: Victims,
        admission: Admission,
        totals: Totals,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._victims = victims
        self._admission = admission
        self._totals = totals

    def make_room(self, request: Request, num_tokens: int, plan: PlanBuilder) -> list[int] | None:
        """Blocks for a running request's next tokens, at the expense of those after it.

        Nobody before it gives way, so none that is already in the plan, and the eldest advances.
        None when the request itself was the last, and was preempted.
        """
        wanted = request.num_computed_tokens + num_tokens
        while (new_block_ids := self._kv.grow(request.request_id, wanted)) is None:
            running = self._roster.running
            later = running[running.index(request) + 1 :]
            victim = self._victims.choose(later, plan.limits) if later else request
            self._preempt(victim, plan)
            if victim is request:
                return None
        request.cover(request.num_slots + len(new_block_ids) * self._kv.block_size)
        return new_block_ids

    def make_way_for_urgent(self, plan: PlanBuilder) -> None:
        """Preempt running requests for a more urgent one that finds no row or room.

        It is admitted in the next step. Equal priorities never displace each other. Comes before
        anything is placed, so that no victim is in the plan.
        """
        urgent = self._admission.next_in_line(plan)
        if urgent is None:
            return
        running = self._roster.running
        for victim in self._victims.displaced_by(urgent, running, plan.limits):
            lacks = self._admission.num_blocks_needed(urgent, plan.limits)
            if len(running) < plan.limits.max_num_seqs and lacks <= self._kv.num_blocks_free:
                return
            self._preempt(victim, plan)

    def recompute_later(self, request: Request) -> None:
        """Drop a request's KV; it waits for its turn."""
        self._kv.free(request.request_id)
        request.drop_kv()
        self._roster.queue(request, RequestStatus.WAITING)

    def _preempt(self, victim: Request, plan: PlanBuilder) -> None:
        mode = self._victims.mode(victim, plan.limits)
        self._totals.preemptions[mode] += 1
        free_before, num_tokens = self._kv.num_blocks_free, victim.num_computed_tokens
        if mode is PreemptionMode.SWAP:
            victim.preempted()
            plan.preempt(victim, self._swap_out(victim))
        else:
            self._totals.tokens_to_recompute += num_tokens
            num_findable, _ = self._kv.num_findable(victim.request_id)
            victim.preempted(num_blocks_hoped=num_findable)
            self.recompute_later(victim)
            plan.preempt(victim)
        logger.info(
            "preempted %s by %s: %d computed tokens, %d → %d free blocks, its preemption no. %d",
            victim.label,
            mode.name.lower(),
            num_tokens,
            free_before,
            self._kv.num_blocks_free,
            victim.num_preemptions,
        )

    def _swap_out(self, victim: Request) -> list[BlockCopy]:
        copies = self._kv.swap_out(victim.request_id, victim.num_computed_tokens)
        assert copies is not None, "a victim is swapped only when the host has room"
        self._totals.blocks_swapped += len(copies)
        self._roster.queue(victim, RequestStatus.SWAPPED)
        return copies
