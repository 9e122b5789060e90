"""Figures of speculation, with vLLM's names; only where tokens are guessed."""

from __future__ import annotations

from serve.api.figures.registry import Maker
from serve.messages import EngineStats


class SpeculationFigures:
    """Counters that advance by what the engine's totals gained."""

    def __init__(self, make: Maker, num_drafts: int) -> None:
        """`num_drafts`: most of a request in a step."""
        self._drafts = make.counter("spec_decode_num_drafts", "Shares of steps that held drafts.")
        self._draft_tokens = make.counter(
            "spec_decode_num_draft_tokens", "Tokens that were guessed."
        )
        self._accepted = make.counter(
            "spec_decode_num_accepted_tokens", "Guessed tokens that were drawn."
        )
        self._per_pos = make.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "The same by the guess's number in its share, from 0.",
            "position",
            [str(number) for number in range(num_drafts)],
        )

    def stepped(self, stats: EngineStats, last: EngineStats) -> None:
        """The totals are those of `stats` now, and were those of `last`."""
        if stats.total_spec_drafts == last.total_spec_drafts:
            return
        self._drafts.inc(stats.total_spec_drafts - last.total_spec_drafts)
        self._draft_tokens.inc(stats.total_spec_draft_tokens - last.total_spec_draft_tokens)
        self._accepted.inc(stats.total_spec_accepted_tokens - last.total_spec_accepted_tokens)
        before = last.spec_accepted_per_pos or (0,) * len(self._per_pos)
        for counter, now, then in zip(
            self._per_pos, stats.spec_accepted_per_pos, before, strict=True
        ):
            counter.inc(now - then)
