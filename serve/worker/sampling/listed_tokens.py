"""The token lists that a request brings, as the arrays from which a step gathers what it edits.

Made once, when the request gets its row: a list may be as long as the vocabulary, and a step that
went through it in Python would keep everybody waiting. Ids outside the vocabulary are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serve.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]

ANY_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """One request's lists; never changed."""

    allowed: Ids | None  # these and no others
    forbidden: Ids  # all but the allowed ones, in place of those where they are fewer
    biased: Ids
    biases: npt.NDArray[np.float32]
    stops: Ids  # not to be sampled within min_tokens
    word_starts: Ids  # [W, width], right-aligned behind `ANY_TOKEN`
    word_ends: Ids  # [W]


def listed_tokens(sampling: SamplingParams, vocab_size: int) -> ListedTokens:
    """The lists of a request."""
    allowed, forbidden = _allowed_or_forbidden(sampling.allowed_token_ids, vocab_size)
    bias = {t: b for t, b in sampling.logit_bias.items() if 0 <= t < vocab_size}
    words = [w for w in sampling.bad_words_token_ids if w and 0 <= w[-1] < vocab_size]
    return ListedTokens(
        allowed=allowed,
        forbidden=forbidden,
        biased=_array(bias),
        biases=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        stops=_known(sampling.stop_token_ids if sampling.min_tokens else (), vocab_size),
        word_starts=_word_starts(words),
        word_ends=_array([word[-1] for word in words]),
    )


def longest_start(words: Sequence[Sequence[int]]) -> int:
    """Tokens that must be remembered to recognise any of these bad words before its last token."""
    return max((len(word) - 1 for word in words), default=0)


def _allowed_or_forbidden(ids: Sequence[int], vocab_size: int) -> tuple[Ids | None, Ids]:
    if not ids:
        return None, _array(())
    is_allowed = np.zeros(vocab_size, dtype=np.bool_)
    is_allowed[_known(ids, vocab_size)] = True
    allowed = np.flatnonzero(is_allowed)
    if len(allowed) <= vocab_size // 2:
        return allowed, _array(())
    return None, np.flatnonzero(~is_allowed)


def _word_starts(words: Sequence[Sequence[int]]) -> Ids:
    width = longest_start(words)
    rows = [[ANY_TOKEN] * (width - len(word) + 1) + list(word[:-1]) for word in words]
    return np.array(rows, dtype=np.int64).reshape(len(words), width)


def _known(ids: Sequence[int], vocab_size: int) -> Ids:
    array = _array(ids)
    return array[(array >= 0) & (array < vocab_size)]


def _array(ids: Iterable[int]) -> Ids:
    return np.fromiter(ids, dtype=np.int64)
