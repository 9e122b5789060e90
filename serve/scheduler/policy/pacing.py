"""What slows prompts down, so that decodes come back in time or prompts run together.

Neither is there where its flag is not set.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.request import Request

logger = logging.getLogger(__name__)

MIN_PREFILL_TOKENS = 16
"""Prompts advance by so much in any case, even when decodes alone take longer than the target."""
AIM = 0.9
"""Share of the target that is aimed at: measured costs are averages, and steps vary."""

TOLD_AFTER = 32
"""Steps in a row that are too slow before the log says so: first measurements are rough."""


class TokenBudget:
    """`--target-itl-ms`: how many tokens a step may have, so that decodes come back in time. The
    whole budget while nobody decodes; else what fits into the target.

    A step is taken to last as long as a step of decodes, and `StepCosts`' price for every token
    beyond one per request. Both are moving averages, so the budget follows what is measured.
    """

    def __init__(self, costs: StepCosts, limits: SchedulerLimits) -> None:
        self._costs = costs
        self._most = limits.max_num_batched_tokens
        self._target_s = limits.target_itl_s
        self._num_too_slow = 0  # steps in a row that cannot hold it

    def tokens(self, running: Sequence[Request]) -> int:
        """For the next step, with these running. Never fewer than they need to decode."""
        if self._target_s is None or not any(r.num_uncomputed_tokens == 1 for r in running):
            return self._most
        num_prefill = self._costs.num_tokens_within(AIM * self._target_s)
        if num_prefill is None:
            return self._most
        if num_prefill < MIN_PREFILL_TOKENS:
            self._tell_if_too_slow(self._target_s)
        return min(self._most, len(running) + max(MIN_PREFILL_TOKENS, num_prefill))

    def _tell_if_too_slow(self, target_s: float) -> None:
        least_s = self._costs.step_s(MIN_PREFILL_TOKENS)
        self._num_too_slow = self._num_too_slow + 1 if least_s > target_s else 0
        if self._num_too_slow == TOLD_AFTER:
            logger.warning(
                "--target-itl-ms %g cannot be held while prompts run: a step of decodes and %d "
                "prompt tokens, the fewest it has then, takes %.3g ms here",
                1e3 * target_s,
                MIN_PREFILL_TOKENS,
                1e3 * least_s,
            )


class PrefillDelay:
    """`--scheduler-delay-factor`: new prompts are held back for a while, to be prefilled together.

    Measures the last step that prefilled; holds waiting requests back for a multiple of it.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_time = 0.0
        self._last_had_prompt = False
        self._last_prompt_latency = 0.0

    def begin_step(self, now: float) -> None:
        """A step is being planned: if the last one prefilled, now is when it was over."""
        if self._last_had_prompt:
            self._last_prompt_latency = now - self._last_time
        self._last_time = now

    def end_step(self, has_prompt: bool) -> None:
        """The step is planned; `has_prompt`: it has more than single-token decodes."""
        self._last_had_prompt = has_prompt

    def allows(self, now: float, earliest_arrival: float | None, num_running: int) -> bool:
        """Whether waiting requests may start. Nobody waits for an idle engine."""
        if self._factor <= 0 or num_running == 0 or earliest_arrival is None:
            return True
        return now - earliest_arrival > self._factor * self._last_prompt_latency
