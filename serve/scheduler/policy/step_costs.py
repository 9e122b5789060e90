"""What steps cost here, as measured: the price of prefilling a token and of copying a block."""

from __future__ import annotations

from serve.scheduler.output import SchedulerOutput

WEIGHT_OF_NEWEST = 0.2
"""Share of the newest step in the moving averages."""
MANY_TOKENS = 1 << 30
"""When prefilling takes no time that can be measured."""


class StepCosts:
    """Moving averages over retired steps.

    A step's time is taken to be that of a step of decodes, and something for every further token
    and every copied block. Steps that do both are not used, since they do not say which cost what.
    """

    def __init__(self) -> None:
        self._decode_step_s: float | None = None
        self._token_s: float | None = None
        self._block_s: float | None = None
        self._found_share = 1.0

    def observe(self, plan: SchedulerOutput, duration_s: float) -> None:
        """A step took so long, from its launch or the retirement before it, whichever was later."""
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        num_extra_tokens = plan.num_scheduled_tokens - len(plan.scheduled)
        more_s = max(0.0, duration_s - (self._decode_step_s or 0.0))
        if num_copies == 0 and num_extra_tokens == 0:
            self._decode_step_s = _blend(self._decode_step_s, duration_s)
        elif num_copies == 0:
            self._token_s = _blend(self._token_s, more_s / num_extra_tokens)
        elif num_extra_tokens == 0:
            self._block_s = _blend(self._block_s, more_s / num_copies)

    def observe_return(self, num_hoped: int, num_found: int) -> None:
        """Of so many blocks that a preempted request left in the prefix cache, so many were still
        there when it came back."""
        if num_hoped:
            self._found_share = _blend(self._found_share, min(1.0, num_found / num_hoped))

    def num_found_again(self, num_cached: int, num_sure: int) -> int:
        """How many blocks in the prefix cache can be expected to be found by who gives them up."""
        return max(num_sure, int(self._found_share * num_cached))

    def recompute_s(self, num_tokens: int) -> float | None:
        """Time to prefill so many tokens again; None before anything was prefilled."""
        return None if self._token_s is None else self._token_s * num_tokens

    def num_tokens_within(self, duration_s: float) -> int | None:
        """Tokens that can be prefilled beside decodes in a step that lasts so long; 0 if the
        decodes alone last longer. None before anything was prefilled."""
        if self._token_s is None:
            return None
        left_s = duration_s - (self._decode_step_s or 0.0)
        return max(0, int(left_s / self._token_s)) if self._token_s > 0 else MANY_TOKENS

    def step_s(self, num_prefill: int) -> float:
        """Time that a step of decodes and so many prompt tokens takes, by what is known."""
        return (self._decode_step_s or 0.0) + (self._token_s or 0.0) * num_prefill

    def swap_s(self, num_blocks: int) -> float | None:
        """Time to copy so many blocks out and in again; None before anything was swapped."""
        return None if self._block_s is None else 2 * self._block_s * num_blocks


def _blend(average: float | None, newest: float) -> float:
    if average is None:
        return newest
    return average + WEIGHT_OF_NEWEST * (newest - average)
