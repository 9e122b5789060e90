"""Speculation: drafts fill what a step has left, and what came of them is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.drafting.drafter import Draft, Drafter
from serve.scheduler.drafting.length import Acceptance, RowCosts, best_lengths
from serve.scheduler.drafting.ngram import NGramDrafter
from serve.scheduler.drafting.suffix import SuffixDrafter
from serve.scheduler.output import ScheduledRequest, SchedulerOutput
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.request import Request
from serve.scheduler.totals import Totals
from serve.speculative_config import SpeculativeConfig

ROWS_PER_REST = 8
"""Where no draft paid, none are sought in as many steps as the step had so many rows: looking for
them costs little, but for every request, and with many there is seldom anything to gain."""


class _Proposal(NamedTuple):
    place: int  # in the plan
    request: Request
    draft: Draft


class Speculator:
    """Owns the drafter and what is known of costs and acceptance.

    Drafts come last: they get tokens of the budget that nobody else wanted, and blocks that leave
    one free for every running request. So they displace nothing and nobody.
    """

    def __init__(
        self, drafter: Drafter, config: SpeculativeConfig, kv: KVCacheManager, totals: Totals
    ) -> None:
        self._drafter = drafter
        self._most = config.num_speculative_tokens
        self._most_requests = (config.disable_by_batch_size or 1 << 30) - 1
        self._kv = kv
        self._totals = totals
        self._costs = RowCosts()
        self._acceptance = Acceptance()
        self._num_resting = 0  # steps in which no drafts are sought
        self._num_matched: dict[Request, int] = {}  # of drafts that are out
        totals.spec_accepted_per_pos = (0,) * self._most

    # ------------------------------------------------------------------ before a step

    def add_drafts(self, plan: PlanBuilder) -> None:
        """Lengthen the decodes of a plan that has nothing else, by as much as pays."""
        num_rows = len(plan.scheduled)
        if not (0 < num_rows <= self._most_requests) or plan.has_prompt or plan.admitted:
            return
        if self._num_resting:
            self._num_resting -= 1
            return
        # Sampled rows cost memory: no more of them than the start has measured.
        most_rows = max(plan.limits.max_num_seqs, 1 + self._most)
        room = min(plan.tokens_left, num_rows * self._most, most_rows - num_rows)
        costs = self._costs.curve(num_rows, num_rows + room)
        if costs is None or room <= 0:
            return
        proposals = self._propose(plan, num_rows, costs)
        rates = [self._acceptance.rate(p.request, p.draft.num_matched) for p in proposals]
        most = [len(p.draft.token_ids) for p in proposals]
        lengths = best_lengths(rates, most, num_rows, costs)
        if not any(lengths):
            self._num_resting = num_rows // ROWS_PER_REST
        for proposal, length in zip(proposals, lengths, strict=True):
            if length:
                self._place(proposal, length, plan)
            else:
                self._acceptance.passed_over(proposal.request)

    def _propose(self, plan: PlanBuilder, num_rows: int, costs: list[float]) -> list[_Proposal]:
        """For the requests whose drafts may be right often enough to pay for a row."""
        rows_for = costs[min(self._most, len(costs) - 1)] - costs[0]
        least = rows_for / costs[0] * num_rows / min(self._most, len(costs) - 1)
        proposals = []
        for place, (share, request) in enumerate(zip(plan.scheduled, plan.requests, strict=True)):
            most = min(self._most, request.max_num_tokens - request.num_tokens)
            if most <= 0 or not _may_draft(share, request):
                continue
            if self._acceptance.best(request) < least / 2:  # what is nearly hopeless is not sought
                self._acceptance.passed_over(request)
                continue
            draft = self._drafter.propose(request, most)
            if draft.token_ids:
                proposals.append(_Proposal(place, request, draft))
        return proposals

    def _place(self, proposal: _Proposal, length: int, plan: PlanBuilder) -> None:
        request = proposal.request
        wanted = request.num_computed_tokens + length
        added: list[int] = []
        if wanted > request.num_slots:
            keep_free = len(plan.scheduled)
            grown = self._kv.grow(request.request_id, wanted, keep_free=keep_free)
            if grown is None:
                length = request.num_slots - request.num_computed_tokens
            else:
                added = grown
                request.cover(request.num_slots + len(added) * self._kv.block_size)
        if length > 0:
            plan.add_drafts(proposal.place, list(proposal.draft.token_ids[:length]), added)
            self._num_matched[request] = proposal.draft.num_matched

    # ------------------------------------------------------------------ after it

    def observe(self, plan: SchedulerOutput, duration_s: float) -> None:
        """A step took so long."""
        num_rows = plan.num_scheduled_tokens
        if num_rows == len(plan.scheduled) + plan.num_drafts and not (
            plan.swap_in or plan.swap_out
        ):
            self._costs.observe(num_rows, duration_s)

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """So many first ones of a request's drafts were right."""
        totals = self._totals
        totals.spec_drafts += 1
        totals.spec_draft_tokens += num_drafts
        totals.spec_accepted_tokens += num_accepted
        totals.spec_accepted_per_pos = tuple(
            count + (number < num_accepted)
            for number, count in enumerate(totals.spec_accepted_per_pos)
        )
        num_matched = self._num_matched.pop(request, 0)
        self._acceptance.verified(request, num_matched, num_drafts, num_accepted)

    def ended(self, request: Request) -> None:
        """The request is over."""
        self._drafter.forget(request)
        self._acceptance.forget(request)
        self._num_matched.pop(request, None)


def _may_draft(share: ScheduledRequest, request: Request) -> bool:
    """Whether its next tokens may be guessed: all before them are known, it wants that, and no
    grammar decides what each of them may be."""
    return (
        share.num_samples == 1
        and len(share.token_ids) == share.num_tokens
        and request.sampling.speculative
        and request.sampling.grammar is None
    )


MAKERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "ngram": lambda config: NGramDrafter(config.prompt_lookup_min, config.prompt_lookup_max),
    "suffix": SuffixDrafter,
}


def make_speculator(config: SpeculativeConfig, kv: KVCacheManager, totals: Totals) -> Speculator:
    """One with the drafter that the config names."""
    return Speculator(MAKERS[config.method](config), config, kv, totals)
