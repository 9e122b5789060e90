"""Which prompts have equal keys for equal beginnings, where angles depend on a prompt's length.

Some RoPE kinds turn a sequence's keys by angles that its whole length decides, so that equal tokens
at equal positions do not give equal keys. What a prompt's length decides is its regime, and only
blocks of one regime may be shared. Generated tokens follow from it: their angles depend on their
positions alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PromptRegimes:
    """The regimes of one model, by `limits` (`CausalModel.prompt_limits`), one for each such RoPE.

    Prompts up to a limit have the same angles. Longer ones have others: the same for all of them
    (longrope), or for each length its own (dynamic). Without limits, all prompts are alike.
    """

    def __init__(self, limits: Sequence[tuple[int, bool]] = ()) -> None:
        self._limits = sorted({limit for limit, _ in limits})
        self._shared_up_to = min((limit for limit, has_own in limits if has_own), default=None)

    def extras(self, num_prompt_tokens: int) -> dict[str, str]:
        """What tells the blocks of a prompt of this length apart from equal tokens in others."""
        if not self._limits:
            return {}
        if self._shared_up_to is not None and num_prompt_tokens > self._shared_up_to:
            return {"prompt": f"of {num_prompt_tokens}"}
        return {"prompt": f"beyond {bisect_left(self._limits, num_prompt_tokens)} limits"}

    def extras_beyond(self, num_tokens: int) -> list[dict[str, str]]:
        """Of all prompts of more tokens that share their blocks with prompts of other lengths."""
        lengths = [num_tokens + 1, *(limit + 1 for limit in self._limits if limit > num_tokens)]
        most = self._shared_up_to
        return [self.extras(n) for n in lengths if most is None or n <= most]
