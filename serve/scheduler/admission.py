"""Letting queued requests in: those that never ran, were preempted, or were swapped out."""

from __future__ import annotations

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.output import RowData
from serve.scheduler.plan_builder import LaunchedSteps, PlanBuilder
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.passing import most_that_passes
from serve.scheduler.policy.service_order import ServiceOrder
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.roster import Roster
from serve.scheduler.totals import Totals


class Admission:
    """Gives queued requests their blocks, a row and their first tokens, in the order of service."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        launched: LaunchedSteps,
        order: ServiceOrder,
        headroom: Headroom,
        costs: StepCosts,
        totals: Totals,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._launched = launched
        self._order = order
        self._headroom = headroom
        self._costs = costs
        self._totals = totals

    def admit_queued(self, plan: PlanBuilder, now: float, may_start: bool) -> None:
        """Admit while there is budget, a row and room. Nobody overtakes the next in line, unless
        that one must wait for the end of a long prompt (policy/passing.py)."""
        while plan.tokens_left and len(self._roster.running) < plan.limits.max_num_seqs:
            request = self.next_in_line(plan)
            if request is None:
                return
            if request.status is RequestStatus.SWAPPED:
                has_blocks = self._swap_in(request, plan)
            else:
                has_blocks = may_start and self._start(request, plan)
            if not has_blocks:
                return
            self._give_row(request, plan, now)

    def next_in_line(self, plan: PlanBuilder) -> Request | None:
        """None also while the next one's last step is out: its tokens are not all known."""
        request = self._roster.next_in_line(may_start_long=plan.may_start_long())
        begun = plan.begun
        if request is not None and begun is not None and not self.passes(request, begun):
            request = self._roster.next_shorter(request, most_that_passes(begun))
        return None if request is None or self._launched.include(request) else request

    def passes(self, request: Request, begun: Request) -> bool:
        """Whether a queued request may start beside a long prompt that has begun: it lacks little
        (what is in the prefix cache it does not lack), or is more urgent."""
        most = most_that_passes(begun)
        if request.order[0] < begun.order[0] or request.num_uncomputed_tokens <= most:
            return True
        matched = self._match_prefix(request) if request.status is RequestStatus.WAITING else []
        return request.num_uncomputed_tokens - len(matched) * self._kv.block_size <= most

    def num_blocks_needed(self, request: Request, limits: SchedulerLimits) -> int:
        """Blocks that must be free for a queued request to be admitted."""
        needed, kept_free = self.blocks_needed(request, limits)
        return needed + kept_free

    def blocks_needed(self, request: Request, limits: SchedulerLimits) -> tuple[int, int]:
        """The same in two parts: its own, and those that stay free for the ones that run."""
        matched = self._match_prefix(request) if request.status is RequestStatus.WAITING else []
        needed = self._kv.num_blocks_needed(request.num_tokens, matched)
        return needed, self._room_beside(request, limits)

    def _swap_in(self, request: Request, plan: PlanBuilder) -> bool:
        """Bring a request's KV back if there is room."""
        if not plan.may_start(request, request.num_uncomputed_tokens):
            return False
        copies = self._kv.swap_in(
            request.request_id,
            request.num_tokens,
            keep_free=self._room_beside(request, plan.limits),
        )
        if copies is None:
            return False
        plan.bring_back(copies)
        self._totals.blocks_swapped += len(copies)
        return True

    def _start(self, request: Request, plan: PlanBuilder) -> bool:
        """Give a waiting request its blocks if there is room."""
        matched = self._match_prefix(request)
        num_matched_tokens = len(matched) * self._kv.block_size
        if not plan.may_start(request, request.num_uncomputed_tokens - num_matched_tokens):
            return False
        # Blocks for all known tokens, however few run now: a prompt that was begun must not find
        # the pool full half way.
        room = self._kv.grow(
            request.request_id,
            request.num_tokens,
            matched=matched,
            keep_free=self._room_beside(request, plan.limits),
        )
        if room is None:
            return False
        self._start_at(request, num_matched_tokens)
        return True

    def _match_prefix(self, request: Request) -> list[int]:
        if not self._kv.enable_prefix_caching:
            return []
        return self._kv.match_prefix(request.known_hashes(), request.num_matchable_tokens)

    def _start_at(self, request: Request, num_matched_tokens: int) -> None:
        """Take the tokens found in the prefix cache for computed."""
        num_found = num_matched_tokens // self._kv.block_size
        self._costs.observe_return(request.num_blocks_hoped, num_found)
        request.start_at(num_matched_tokens, self._kv.block_size)
        if request.first_scheduled_time is None and self._kv.enable_prefix_caching:
            request.note_cached()
            self._totals.prefix_cache_queries += request.num_tokens
            self._totals.prefix_cache_hits += num_matched_tokens

    def _give_row(self, request: Request, plan: PlanBuilder, now: float) -> None:
        """A row, and the first tokens, for a request that has its blocks."""
        is_new = request.status is RequestStatus.WAITING
        self._roster.admit(request)
        if request.first_scheduled_time is None:
            request.begin(now)
            self._order.started(request)
        block_ids = self._kv.block_ids(request.request_id)
        row = RowData(
            request_id=request.request_id,
            sampling=request.sampling,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=block_ids,
        )
        plan.admit(row, is_new=is_new)
        request.cover(len(block_ids) * self._kv.block_size)
        plan.keep_for(request, plan.tokens_left)
        plan.place_prompt(request)

    def _room_beside(self, request: Request, limits: SchedulerLimits) -> int:
        return self._headroom.blocks(request, len(self._roster.running), limits)
