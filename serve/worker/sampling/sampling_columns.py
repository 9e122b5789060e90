"""SamplingColumns: every running request's sampling wishes, as columns over rows.

Host memory only: a step gathers the rows it samples and sends the few numbers it needs. `wishes`
tells which extras a row uses, so that a batch pays for an extra only when one of its rows does.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt

from serve.sampling_params import SamplingParams
from serve.worker.sampling.listed_tokens import listed_tokens

Rows = npt.NDArray[np.int64]


class Wish(IntFlag):
    """What a row asks of sampling beyond the most likely token."""

    RANDOM = 1
    TOP = 2  # top_k or top_p
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16
    ALLOWED = 32  # only some tokens
    BAD_WORDS = 64
    MIN_TOKENS = 128
    LOGPROBS = 256


# Columns of `numbers`.
TEMPERATURE, TOP_K, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(7)

PENALTIES = slice(PRESENCE, REPETITION + 1)

_LISTS = Wish.ALLOWED | Wish.BAD_WORDS | Wish.BIAS | Wish.MIN_TOKENS
_NO_TOP_P = 2.0  # above 1, where rounding of a running sum could still cut the last tokens


class SamplingColumns:
    """Filled by `admit`; a released row keeps its values until it is admitted anew."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.wishes = np.zeros(num_rows, dtype=np.int64)
        self.numbers = np.zeros((num_rows, 7), dtype=np.float32)
        self.seeds = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.params = [SamplingParams()] * num_rows
        nothing = listed_tokens(SamplingParams(), vocab_size)
        self.listed = [nothing] * num_rows  # of rows that wish for what lists tokens

    def admit(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Write a request's wishes into its row."""
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else self.vocab_size
        top_p = sampling.top_p if sampling.top_p < 1.0 else _NO_TOP_P
        self.params[row] = sampling
        self.wishes[row] = wishes = _wishes(sampling, self.vocab_size)
        if wishes & _LISTS:
            self.listed[row] = listed_tokens(sampling, self.vocab_size)
        self.numbers[row] = (
            0.0 if sampling.greedy else sampling.temperature,
            top_k,
            top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        # The front draws a seed for those that bring none: a request that is computed again, here
        # or in another engine, must draw the same tokens.
        assert sampling.greedy or sampling.seed is not None, "a random draw needs a seed"
        self.seeds[row] = sampling.seed or 0
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.min_tokens[row] = sampling.min_tokens


def _wishes(sampling: SamplingParams, vocab_size: int) -> Wish:
    wishes = Wish(0)
    if not sampling.greedy:
        wishes |= Wish.RANDOM
        if 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0:
            wishes |= Wish.TOP
        if sampling.min_p > 0.0:
            wishes |= Wish.MIN_P
    if sampling.uses_penalties:
        wishes |= Wish.PENALTIES
    if sampling.logit_bias:
        wishes |= Wish.BIAS
    if sampling.allowed_token_ids:
        wishes |= Wish.ALLOWED
    if sampling.bad_words_token_ids:
        wishes |= Wish.BAD_WORDS
    if sampling.min_tokens > 0 and sampling.stop_token_ids:
        wishes |= Wish.MIN_TOKENS
    if sampling.logprobs is not None:
        wishes |= Wish.LOGPROBS
    return wishes
