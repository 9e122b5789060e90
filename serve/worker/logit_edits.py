"""Changes to logits before a token is chosen: allowed and banned tokens, bias, penalties.

Each function works on all rows that ask at once and changes nothing in the others. Ids outside the
vocabulary are ignored: they can neither be generated nor reach into another row's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve.kernels.base import SamplingKernels
from serve.sampling_params import SamplingParams
from serve.worker.sampling_columns import (
    PENALTIES,
    Rows,
    SamplingColumns,
    Wish,
)
from serve.worker.token_memory import LastTokens, TokenCounts
from serve.worker.uploads import Uploads

BANNED = torch.finfo(torch.float32).min
"""Finite, so that a banned token still beats tokens that are not allowed at all (-inf)."""

_ANY_TOKEN = -1


class LogitEditor:
    """Applies what the rows of a batch wish, in vLLM's order: allowed, bans, bias, penalties."""

    def __init__(
        self,
        columns: SamplingColumns,
        counts: TokenCounts,
        last_tokens: LastTokens,
        uploads: Uploads,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`kernels`: the device's own penalties, equal to those here."""
        self._kernels = kernels
        self._columns = columns
        self._counts = counts
        self._last_tokens = last_tokens
        self._uploads = uploads

    def apply(self, logits: Tensor, rows: Rows, positions: npt.NDArray[np.int64]) -> None:
        """Edit logits [S, vocab] in place. positions [S]: where the new token will stand."""
        wishes = self._columns.wishes[rows]
        steps: tuple[tuple[Wish, Callable[[Tensor, Rows, Rows], None]], ...] = (
            (Wish.ALLOWED, self._keep_allowed),
            (Wish.BAD_WORDS, self._ban_bad_words),
            (Wish.BIAS, self._add_bias),
            (Wish.PENALTIES, self._penalize),
        )
        for wish, step in steps:
            where = np.flatnonzero(wishes & wish)
            if where.size:
                step(logits, where, rows[where])
        generated = positions - self._columns.num_prompt_tokens[rows]
        too_early = generated < self._columns.min_tokens[rows]
        where = np.flatnonzero(too_early & ((wishes & Wish.MIN_TOKENS) > 0))
        if where.size:
            self._ban_stops(logits, where, rows[where])

    def _keep_allowed(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        index = self._token_index(where, rows, lambda params: params.allowed_token_ids)
        kept = logits[index]
        logits[self._send(where)] = -torch.inf
        logits[index] = kept

    def _add_bias(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        index = self._token_index(where, rows, lambda params: params.logit_bias)
        biases = [
            bias
            for row in rows.tolist()
            for token, bias in self._columns.params[row].logit_bias.items()
            if 0 <= token < self._columns.vocab_size
        ]
        values = self._send(np.array(biases, dtype=np.float32))
        logits.index_put_(index, values, accumulate=True)

    def _ban_stops(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        index = self._token_index(where, rows, lambda params: params.stop_token_ids)
        logits.index_put_(index, logits.new_tensor(BANNED))

    def _ban_bad_words(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        """Ban each word's last token where the tokens before it have just been written."""
        words = [
            (place, row, word)
            for place, row in zip(where.tolist(), rows.tolist(), strict=True)
            for word in self._columns.params[row].bad_words_token_ids
            if word and 0 <= word[-1] < self._columns.vocab_size
        ]
        if not words:
            return
        recent = self._last_tokens.of(np.array([row for _, row, _ in words], dtype=np.int64))
        width = recent.shape[1]
        starts = np.array(
            [[_ANY_TOKEN] * (width - len(word) + 1) + list(word[:-1]) for _, _, word in words],
            dtype=np.int64,
        ).reshape(len(words), width)
        wanted = self._send(starts)
        written = ((recent == wanted) | (wanted == _ANY_TOKEN)).all(dim=1)
        index = (
            self._send(np.array([place for place, _, _ in words], dtype=np.int64)),
            self._send(np.array([word[-1] for _, _, word in words], dtype=np.int64)),
        )
        bans = torch.where(written, BANNED, 0.0)
        logits.index_put_(index, bans, accumulate=True)

    def _penalize(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        """OpenAI's presence and frequency penalties on generated tokens, and the repetition
        penalty of CTRL (arXiv:1909.05858) on prompt and generated tokens."""
        controls = self._send(self._columns.numbers[rows][:, PENALTIES])
        generated, in_prompt = self._counts.of(rows)
        places = self._send(where)
        edited = logits[places]
        if self._kernels is not None:
            self._kernels.penalize(edited, controls, generated, in_prompt)
            logits[places] = edited
            return
        presence, frequency, repetition = (controls[:, column, None] for column in range(3))
        weakened = torch.where(edited > 0, edited / repetition, edited * repetition)
        edited = torch.where((generated > 0) | in_prompt, weakened, edited)
        edited -= frequency * generated + presence * (generated > 0)
        logits[places] = edited

    def _token_index(
        self, where: Rows, rows: Rows, ids_of: Callable[[SamplingParams], Iterable[int]]
    ) -> tuple[Tensor, Tensor]:
        """(row of the batch, token id) of every token that `ids_of` lists for these rows."""
        places: list[int] = []
        tokens: list[int] = []
        for place, row in zip(where.tolist(), rows.tolist(), strict=True):
            listed = [t for t in ids_of(self._columns.params[row]) if self._is_token(t)]
            places += [place] * len(listed)
            tokens += listed
        return (
            self._send(np.array(places, dtype=np.int64)),
            self._send(np.array(tokens, dtype=np.int64)),
        )

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._columns.vocab_size

    def _send(self, array: npt.NDArray[np.generic]) -> Tensor:
        (sent,) = self._uploads.send(array)
        return sent


def longest_start(words: Sequence[Sequence[int]]) -> int:
    """Tokens that must be remembered to recognise any of these bad words before its last token."""
    return max((len(word) - 1 for word in words), default=0)
