"""Who gives up its blocks, and how. Decides; `Preemption` acts."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.limits import SchedulerLimits, within
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.request import Request


class PreemptionMode(Enum):
    """RECOMPUTE drops the KV and prefills again later; SWAP keeps it in host memory."""

    RECOMPUTE = auto()
    SWAP = auto()


class Victims:
    """Chooses by the limits in force, and by what steps have cost so far."""

    def __init__(self, kv: KVCacheManager, costs: StepCosts, headroom: Headroom) -> None:
        self._kv = kv
        self._costs = costs
        self._headroom = headroom

    def choose(self, candidates: Sequence[Request], limits: SchedulerLimits) -> Request:
        """One of the least urgent candidates, given in order of service; of equals, the last."""
        last = candidates[-1]
        if limits.preemption_victim == "last-admitted":
            return last
        peers = [r for r in reversed(candidates) if r.priority == last.priority]
        if limits.preemption_victim == "least-progress":
            return min(peers, key=lambda r: r.num_computed_tokens)
        if limits.preemption_victim == "most-blocks":
            return max(peers, key=self._num_freed)
        return min(peers, key=lambda r: self._cost_per_block(r, limits))

    def mode(self, victim: Request, limits: SchedulerLimits) -> PreemptionMode:
        """Swapping needs room on the host: without it the victim is recomputed, whatever is set."""
        mode = limits.preemption_mode
        if mode == "recompute" or not self._kv.can_swap_out(victim.num_computed_tokens):
            return PreemptionMode.RECOMPUTE
        if mode == "auto" and self._recompute_is_cheaper(victim):
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def displaced_by(
        self, urgent: Request, running: Sequence[Request], limits: SchedulerLimits
    ) -> list[Request]:
        """Running requests that may give way to a more urgent one, in the order to do it.

        Equal priorities never displace each other, nor does a younger request one that has aged to
        its level. None are named when even all of them would not do: nobody is displaced in vain.
        """
        victims = []
        for request in reversed(running):  # the last first, up to one that may stay
            if request.priority <= urgent.priority or request.order < urgent.order:
                break
            victims.append(request)
        if not victims:
            return []
        staying = running[: len(running) - len(victims)]
        freed = self._kv.num_blocks_only_held_by([victim.request_id for victim in victims])
        needed = self._kv.num_blocks_needed(urgent.num_tokens)
        needed += self._headroom.blocks(urgent, len(staying), limits)
        has_row = len(staying) < limits.max_num_seqs
        has_room = needed <= self._kv.num_blocks_free + freed
        return victims if has_row and has_room and _may_be_partial_beside(staying, limits) else []

    def _recompute_is_cheaper(self, victim: Request) -> bool:
        """By measured costs. Swapping is tried while its cost, or that of prefill, is not known."""
        recompute_s, swap_s = self._recompute_s(victim), self._swap_s(victim)
        return recompute_s is not None and swap_s is not None and recompute_s < swap_s

    def _cost_per_block(self, victim: Request, limits: SchedulerLimits) -> float:
        """Seconds lost for each block that becomes free; in tokens while nothing is measured."""
        swaps = self.mode(victim, limits) is PreemptionMode.SWAP
        cost = self._swap_s(victim) if swaps else self._recompute_s(victim)
        lost = self._num_tokens_lost(victim) if cost is None else cost
        return lost / max(1, self._num_freed(victim))

    def _recompute_s(self, victim: Request) -> float | None:
        return self._costs.recompute_s(self._num_tokens_lost(victim))

    def _num_tokens_lost(self, victim: Request) -> int:
        """What must be computed again: not what the prefix cache will give back."""
        cached, sure = self._kv.num_findable(victim.request_id)
        num_found = self._costs.num_found_again(cached, sure) * self._kv.block_size
        return max(1, victim.num_computed_tokens - num_found)

    def _swap_s(self, victim: Request) -> float | None:
        return self._costs.swap_s(self._kv.num_blocks_for(victim.num_computed_tokens))

    def _num_freed(self, victim: Request) -> int:
        return self._kv.num_blocks_only_held_by([victim.request_id])


def _may_be_partial_beside(staying: Sequence[Request], limits: SchedulerLimits) -> bool:
    """Whether those that stay leave room for another partial prefill, of any length."""
    partial = [r for r in staying if r.num_uncomputed_tokens > 1]
    num_long = sum(r.num_tokens > limits.max_share for r in partial)
    return within(len(partial), limits.max_num_partial_prefills) and within(
        num_long, limits.max_long_partial_prefills
    )
