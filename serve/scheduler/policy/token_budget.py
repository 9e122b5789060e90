"""`--target-itl-ms`: how many tokens a step may have, so that decodes come back in time."""

from __future__ import annotations

from collections.abc import Sequence

from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.request import Request

MIN_PREFILL_TOKENS = 16
"""Prompts advance by so much in any case, even when decodes alone take longer than the target."""
AIM = 0.9
"""Share of the target that is aimed at: measured costs are averages, and steps vary."""


class TokenBudget:
    """The whole budget while nobody decodes, or without a target; else what fits into the target.

    A step is taken to last as long as a step of decodes, and `StepCosts`' price for every token
    beyond one per request. Both are moving averages, so the budget follows what is measured.
    """

    def __init__(self, costs: StepCosts, limits: SchedulerLimits) -> None:
        self._costs = costs
        self._most = limits.max_num_batched_tokens
        self._target_s = limits.target_itl_s

    def tokens(self, running: Sequence[Request]) -> int:
        """For the next step, with these running. Never fewer than they need to decode."""
        if self._target_s is None or not any(r.num_uncomputed_tokens == 1 for r in running):
            return self._most
        num_prefill = self._costs.num_tokens_within(AIM * self._target_s)
        if num_prefill is None:
            return self._most
        return min(self._most, len(running) + max(MIN_PREFILL_TOKENS, num_prefill))
