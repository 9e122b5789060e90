"""Who gives up its blocks, how, and how much room it needs to come back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.limits import SchedulerLimits, within
from serve.scheduler.request import Request
from serve.scheduler.step_costs import StepCosts
from serve.scheduler.watermark import Watermark


class PreemptionMode(Enum):
    """RECOMPUTE drops the KV and prefills again later; SWAP keeps it in host memory."""

    RECOMPUTE = auto()
    SWAP = auto()


class Preemption:
    """Decides; the scheduler acts."""

    def __init__(self, kv: KVCacheManager, costs: StepCosts, limits: SchedulerLimits) -> None:
        self._kv = kv
        self._costs = costs
        self._limits = limits
        self._mode = limits.preemption_mode
        self._victim = limits.preemption_victim
        self.watermark = Watermark(kv.num_blocks)

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """One of the least urgent candidates, given in order of service; of equals, the last."""
        last = candidates[-1]
        if self._victim == "last-admitted":
            return last
        peers = [r for r in reversed(candidates) if r.priority == last.priority]
        if self._victim == "least-progress":
            return min(peers, key=lambda r: r.num_computed_tokens)
        if self._victim == "most-blocks":
            return max(peers, key=self._num_freed)
        return min(peers, key=self._cost_per_block)

    def choose_mode(self, victim: Request) -> PreemptionMode:
        """Swapping needs room on the host: without it the victim is recomputed, whatever is set."""
        if self._mode == "recompute" or not self._kv.can_swap_out(victim.num_computed_tokens):
            return PreemptionMode.RECOMPUTE
        if self._mode == "auto" and self._recompute_is_cheaper(victim):
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def victims_for(self, urgent: Request, running: Sequence[Request]) -> list[Request]:
        """Running requests that may be displaced for a more urgent one, in the order to do it.

        Equal priorities never displace each other, nor does a younger request one that has aged to
        its level. None are named when even all of them would not
        do: nobody is displaced in vain.
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
        needed += self.headroom(urgent, len(staying))
        has_row = len(staying) < self._limits.max_num_seqs
        has_room = needed <= self._kv.num_blocks_free + freed
        return victims if has_row and has_room and self._may_be_partial_beside(staying) else []

    def headroom(self, request: Request, num_running: int) -> int:
        """Blocks to leave free when admitting a request, so that it evicts nobody at once.

        None when nothing runs. Otherwise the watermark, and for a request that was preempted
        before, room for the others to grow, which doubles with each of its preemptions: after about
        log2(pool size) of them it comes back only alone. That bounds preemptions per request, with
        no setting to tune and nothing held back from requests that were never preempted.
        """
        if num_running == 0:
            return 0
        doublings = min(request.num_preemptions, 30)
        return self.watermark.blocks + num_running * ((1 << doublings) - 1)

    def _may_be_partial_beside(self, staying: Sequence[Request]) -> bool:
        """Whether those that stay leave room for another partial prefill, of any length."""
        partial = [r for r in staying if r.num_uncomputed_tokens > 1]
        num_long = sum(r.num_tokens > self._limits.max_share for r in partial)
        return within(len(partial), self._limits.max_num_partial_prefills) and within(
            num_long, self._limits.max_long_partial_prefills
        )

    def _recompute_is_cheaper(self, victim: Request) -> bool:
        """By measured costs. Swapping is tried while its cost, or that of prefill, is not known."""
        recompute_s = self._costs.recompute_s(victim.num_computed_tokens)
        swap_s = self._costs.swap_s(self._kv.num_blocks_for(victim.num_computed_tokens))
        return recompute_s is not None and swap_s is not None and recompute_s < swap_s

    def _num_freed(self, victim: Request) -> int:
        return self._kv.num_blocks_only_held_by([victim.request_id])

    def _cost_per_block(self, victim: Request) -> float:
        """Seconds lost for each block that becomes free; in tokens while nothing is measured."""
        num_tokens = victim.num_computed_tokens
        if self.choose_mode(victim) is PreemptionMode.SWAP:
            cost = self._costs.swap_s(self._kv.num_blocks_for(num_tokens))
        else:
            cost = self._costs.recompute_s(num_tokens)
        return (num_tokens if cost is None else cost) / max(1, self._num_freed(victim))
