"""Changes to logits before a token is chosen: allowed and banned tokens, bias, penalties.

Each function works on all rows that ask at once and changes nothing in the others. Ids outside the
vocabulary are ignored: they can neither be generated nor reach into another row's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve.kernels.sampling import SamplingKernels
from serve.worker.device.device import Uploads
from serve.worker.sampling.drafts import Drafts
from serve.worker.sampling.listed_tokens import ANY_TOKEN, Ids, ListedTokens
from serve.worker.sampling.sampling_columns import (
    PENALTIES,
    Rows,
    SamplingColumns,
    Wish,
)
from serve.worker.sampling.token_memory import RecentTokens, TokenCounts

BANNED = torch.finfo(torch.float32).min
"""Finite, so that a banned token still beats tokens that are not allowed at all (-inf)."""


class LogitEditor:
    """Applies what the rows of a batch wish, in vLLM's order: allowed, bans, bias, penalties."""

    def __init__(
        self,
        columns: SamplingColumns,
        counts: TokenCounts,
        recent_tokens: RecentTokens,
        uploads: Uploads,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`kernels`: the device's own penalties, equal to those here."""
        self._kernels = kernels
        self._columns = columns
        self._counts = counts
        self._recent_tokens = recent_tokens
        self._uploads = uploads

    def apply(
        self,
        logits: Tensor,
        rows: Rows,
        positions: npt.NDArray[np.int64],
        drafts: Drafts | None = None,
    ) -> None:
        """Edit logits [S, vocab] in place. positions [S]: where the new token will stand; behind
        drafts, if there are some, which count as written."""
        wishes = self._columns.wishes[rows]
        steps: tuple[tuple[Wish, Callable[[Tensor, Rows, Rows], None]], ...] = (
            (Wish.ALLOWED, self._keep_allowed),
            (Wish.BAD_WORDS, partial(self._ban_bad_words, drafts)),
            (Wish.BIAS, self._add_bias),
            (Wish.PENALTIES, partial(self._penalize, drafts)),
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
        lists = self._listed(rows)
        few = np.array([each.allowed is not None for each in lists])
        forbidden = self._index(where, [each.forbidden for each in lists])
        if forbidden is not None:
            logits.index_put_(forbidden, _scalar(-torch.inf, logits))
        if few.any():
            index = self._index(where[few], [e.allowed for e in lists if e.allowed is not None])
            kept = None if index is None else logits[index]
            logits.index_fill_(0, self._send(where[few]), -torch.inf)
            if index is not None and kept is not None:
                logits.index_put_(index, kept)

    def _add_bias(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        lists = self._listed(rows)
        index = self._index(where, [each.biased for each in lists])
        if index is not None:
            values = self._send(np.concatenate([each.biases for each in lists]))
            logits.index_put_(index, values, accumulate=True)

    def _ban_stops(self, logits: Tensor, where: Rows, rows: Rows) -> None:
        index = self._index(where, [each.stops for each in self._listed(rows)])
        if index is not None:
            logits.index_put_(index, _scalar(BANNED, logits))

    def _ban_bad_words(
        self, drafts: Drafts | None, logits: Tensor, where: Rows, rows: Rows
    ) -> None:
        """Ban each word's last token where the tokens before it have just been written."""
        lists = self._listed(rows)
        index = self._index(where, [each.word_ends for each in lists])
        if index is None:
            return
        counts = [len(each.word_ends) for each in lists]
        recent = self._recent_tokens.of(np.repeat(rows, counts))
        if drafts is not None:
            recent = drafts.follow(recent, np.repeat(where, counts))
        starts = np.full((sum(counts), recent.shape[1]), ANY_TOKEN, dtype=np.int64)
        for end, each in zip(np.cumsum(counts).tolist(), lists, strict=True):
            num_words, width = each.word_starts.shape
            starts[end - num_words : end, recent.shape[1] - width :] = each.word_starts
        wanted = self._send(starts)
        written = ((recent == wanted) | (wanted == ANY_TOKEN)).all(dim=1)
        logits.index_put_(index, written.to(logits.dtype).mul_(BANNED), accumulate=True)

    def _penalize(self, drafts: Drafts | None, logits: Tensor, where: Rows, rows: Rows) -> None:
        """OpenAI's presence and frequency penalties on generated tokens, and the repetition
        penalty of CTRL (arXiv:1909.05858) on prompt and generated tokens."""
        controls = self._send(self._columns.numbers[rows][:, PENALTIES])
        generated, in_prompt = self._counts.of(rows)  # copies
        if drafts is not None:
            drafts.count(generated, where)
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

    def _listed(self, rows: Rows) -> list[ListedTokens]:
        return [self._columns.listed[row] for row in rows.tolist()]

    def _index(self, where: Rows, lists: Sequence[Ids]) -> tuple[Tensor, Tensor] | None:
        """(row of the batch, token id) of every token of the rows' lists; None if there is none."""
        tokens = np.concatenate(lists)
        if not tokens.size:
            return None
        places = np.repeat(where, [len(ids) for ids in lists])
        return self._send(places), self._send(tokens)

    def _send(self, array: npt.NDArray[np.generic]) -> Tensor:
        (sent,) = self._uploads.send(array)
        return sent


def _scalar(value: float, like: Tensor) -> Tensor:
    """Made on the device: a copy from the host would wait there for the whole step."""
    return torch.full((), value, dtype=like.dtype, device=like.device)
