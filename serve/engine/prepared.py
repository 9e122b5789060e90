"""A request that has been checked, before any of its choices begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve.sampling_params import SamplingParams
from serve.text.detokenizer import TextPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all choices of one prompt share. `end_of_text_ids` are the ids whose stop the client did
    not ask for by number."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    end_of_text_ids: frozenset[int]
    text: TextPlan

    def for_engine(self, seed: int | None) -> SamplingParams:
        """The sampling as the engine is told, which knows no text: without stop strings. `seed`
        None: its own."""
        sampling = self.sampling
        if seed is None and not sampling.stop:
            return sampling
        own = sampling.seed if seed is None else seed
        return replace(sampling, stop=(), seed=own)
