"""Notices that an output has begun to repeat itself, token for token."""

from __future__ import annotations

from collections.abc import Sequence

from serve.sampling_params import RepetitionDetection


class RepetitionDetector:
    """Watches one request's generated tokens. Nothing is reported before `min_tokens` of them."""

    def __init__(self, wanted: RepetitionDetection, min_tokens: int) -> None:
        self._sizes = range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1)
        self._count = wanted.min_count
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take new tokens; how many of them it took to complete a repetition, None without one."""
        for number, token_id in enumerate(token_ids, 1):
            self._token_ids.append(token_id)
            if len(self._token_ids) >= self._min_tokens and self._repeats():
                return number
        return None

    def _repeats(self) -> bool:
        ids = self._token_ids
        last = ids[-1]
        for size in self._sizes:
            if size * self._count > len(ids):
                return False
            span = size * (self._count - 1)
            # The first test leaves few sizes to compare whole.
            if ids[-1 - size] == last and ids[-span:] == ids[-span - size : -size]:
                return True
        return False
