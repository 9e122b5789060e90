"""Sampler: logits and the rows' wishes → token ids, for a whole batch at once.

All arithmetic is fp32. A batch in which nobody asks for more than the most likely token costs one
argmax. Random tokens are a pure function of (seed, position) and the logits: see noise.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve.kernels.sampling import LogprobTensors, SamplingKernels
from serve.worker.device.device import Device, Uploads
from serve.worker.executor import TokenMask, words_for
from serve.worker.sampling.drafts import Drafts
from serve.worker.sampling.logit_edits import BANNED, LogitEditor
from serve.worker.sampling.logprobs import score
from serve.worker.sampling.noise import gumbel, noise_keys, token_hashes
from serve.worker.sampling.sampling_columns import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Rows,
    SamplingColumns,
    Wish,
)
from serve.worker.sampling.token_mask import mask_tokens

_EDITS = Wish.ALLOWED | Wish.BAD_WORDS | Wish.BIAS | Wish.PENALTIES | Wish.MIN_TOKENS

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

_FIRST_WIDTH = 256
_WIDER = 8


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Device tensors of one step, valid until the next."""

    token_ids: Tensor  # [S] int64
    logprobs: LogprobTensors | None  # of the rows in `logprob_places`
    logprob_places: list[int]  # which of the S rows asked
    excluded: Tensor | None = None  # [M] bool; whether nothing was left to draw, by the mask's rows


class Sampler:
    """Draws tokens; keeps nothing from one step to the next."""

    def __init__(
        self,
        columns: SamplingColumns,
        editor: LogitEditor,
        device: Device,
        uploads: Uploads,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        kernels: SamplingKernels | None = None,
    ) -> None:
        """`kernels`: the device's own draw, which gives the tokens that the code here gives."""
        self._columns = columns
        self._editor = editor
        self._uploads = uploads
        self._kernels = kernels
        self._argmax = (kernels and kernels.argmax) or _argmax
        self._score = (kernels and kernels.score) or score
        self._mask = (kernels and kernels.mask) or mask_tokens
        self._scores_raw = logprobs_mode == "raw_logprobs"
        self._hashes = token_hashes(columns.vocab_size, device.torch_device)
        # One step's choice; the next one's may overwrite it, in the order of the device's work.
        num_rows = len(columns.wishes)
        self._chosen = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)

    def sample(
        self,
        logits: Tensor,
        rows: Rows,
        positions: npt.NDArray[np.int64],
        drafts: Drafts | None = None,
        mask: TokenMask | None = None,
    ) -> SamplerOutput:
        """Choose a token for each row of logits [S, vocab] fp32, which it may overwrite.

        rows [S]: whose they are; positions [S]: where the new token will stand in its request;
        drafts: those that stand before it, where a row is here more than once. The mask's rows are
        rows of `logits`; it comes after everything that the requests wish.
        """
        wishes = self._columns.wishes[rows]
        any_wish = int(np.bitwise_or.reduce(wishes))
        if not any_wish and mask is None:
            return SamplerOutput(self._most_likely(logits), None, [])
        asking = np.flatnonzero(wishes & Wish.LOGPROBS)
        before_edits = asking.size and self._scores_raw
        judged = logits[self._send(asking)] if before_edits else None  # a copy
        if any_wish & _EDITS:
            self._editor.apply(logits, rows, positions, drafts)
        masked = None if mask is None else self._keep_unmasked(logits, mask)
        token_ids = self._choose(logits, rows, positions, wishes)
        excluded = None if masked is None else _excluded(logits, masked, token_ids)
        if not asking.size:
            return SamplerOutput(token_ids, None, [], excluded)
        if judged is None:
            judged = self._processed(logits[self._send(asking)], rows[asking], wishes[asking])
        num_top = max(self._columns.params[row].logprobs or 0 for row in rows[asking].tolist())
        scored = self.score(judged, token_ids[self._send(asking)], num_top)
        return SamplerOutput(token_ids, scored, asking.tolist(), excluded)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """`logprobs.score`, by the device's own code if it has some."""
        return self._score(logits, token_ids, num_top)

    def _keep_unmasked(self, logits: Tensor, mask: TokenMask) -> Tensor:
        """Apply a mask; its rows."""
        num_words = words_for(self._columns.vocab_size)
        assert mask.bits.shape == (len(mask.rows), num_words), (mask.bits.shape, num_words)
        rows, bits = self._uploads.send(mask.rows, mask.bits)
        self._mask(logits, rows, bits)
        return rows

    def _choose(
        self,
        logits: Tensor,
        rows: Rows,
        positions: npt.NDArray[np.int64],
        wishes: npt.NDArray[np.int64],
    ) -> Tensor:
        random = np.flatnonzero(wishes & Wish.RANDOM)
        if not random.size:
            return self._most_likely(logits)
        if self._kernels is not None:
            numbers = self._send(self._columns.numbers[rows])
            keys = self._send(noise_keys(self._columns.seeds[rows], positions))
            return self._kernels.draw(logits, numbers, keys, self._room(len(rows)))
        if random.size == len(rows):
            return self._draw(logits, rows, positions, wishes)
        token_ids = self._most_likely(logits)
        places = self._send(random)
        token_ids[places] = self._draw(
            logits[places], rows[random], positions[random], wishes[random]
        )
        return token_ids

    def _most_likely(self, logits: Tensor) -> Tensor:
        return self._argmax(logits, self._room(len(logits)))

    def _room(self, count: int) -> Tensor:
        """Where so many chosen tokens go; drafts may make them more than there are rows."""
        if count > len(self._chosen):
            self._chosen = self._chosen.new_zeros(count)
        return self._chosen[:count]

    def _draw(
        self,
        logits: Tensor,
        rows: Rows,
        positions: npt.NDArray[np.int64],
        wishes: npt.NDArray[np.int64],
    ) -> Tensor:
        """One draw from each row's distribution, after temperature, min_p, top_k and top_p."""
        numbers = self._send(self._columns.numbers[rows])
        keys = self._send(noise_keys(self._columns.seeds[rows], positions))
        scaled = _scaled(logits, numbers, wishes)
        limited = np.flatnonzero(wishes & Wish.TOP)
        if not limited.size:
            return self._gumbel_argmax(scaled, keys)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        at = self._send(limited)
        token_ids[at] = self._draw_from_top(scaled[at], numbers[at], keys[at])
        at = self._send(np.flatnonzero((wishes & Wish.TOP) == 0))
        token_ids[at] = self._gumbel_argmax(scaled[at], keys[at])
        return token_ids

    def _gumbel_argmax(self, scaled: Tensor, keys: Tensor) -> Tensor:
        return gumbel(self._hashes, keys).add_(scaled).argmax(dim=-1)

    def _draw_from_top(self, scaled: Tensor, numbers: Tensor, keys: Tensor) -> Tensor:
        """Draw where only the top_k most likely tokens, and of these the smallest set with at least
        top_p of their probability, may be chosen.

        Sorting the vocabulary is slow and seldom needed: the best few hundred tokens are tried
        first, and rows that need more are tried again with more.
        """
        token_ids = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
        open_rows = torch.arange(len(scaled), device=scaled.device)
        width = _FIRST_WIDTH
        while len(open_rows):
            width = min(width, scaled.shape[1])
            candidates = scaled[open_rows]
            values, ids = candidates.topk(width)
            kept, decided = keep_top(values, candidates, numbers[open_rows])
            noise = gumbel(self._hashes[ids], keys[open_rows])
            best = noise.add_(kept).argmax(dim=-1, keepdim=True)
            token_ids[open_rows] = ids.gather(1, best).squeeze(1)
            open_rows = open_rows[~decided]
            width *= _WIDER
        return token_ids

    def _processed(self, logits: Tensor, rows: Rows, wishes: npt.NDArray[np.int64]) -> Tensor:
        """Edited logits [L, vocab], overwritten with those of the distribution drawn from; rows
        that take the most likely token keep their edited ones."""
        logits.masked_fill_(logits <= BANNED / 2, -torch.inf)
        random = np.flatnonzero(wishes & Wish.RANDOM)
        if random.size:
            at = self._send(random)
            numbers = self._send(self._columns.numbers[rows[random]])
            scaled = _scaled(logits[at], numbers, wishes[random])
            values, ids = scaled.sort(dim=-1, descending=True)
            kept, _ = keep_top(values, scaled, numbers)
            logits[at] = scaled.scatter_(1, ids, kept)
        return logits

    def _send(self, array: npt.NDArray[np.generic]) -> Tensor:
        (sent,) = self._uploads.send(array)
        return sent


def _argmax(logits: Tensor, out: Tensor) -> Tensor:
    return torch.argmax(logits, dim=-1, out=out)


def _excluded(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """Of these rows [M], those whose token had to be one that is not allowed."""
    return ~(logits[rows, token_ids[rows]] > -torch.inf)


def _scaled(logits: Tensor, numbers: Tensor, wishes: npt.NDArray[np.int64]) -> Tensor:
    """Logits [S, vocab] after temperature and min_p, less each row's maximum."""
    # Relative to the row's maximum nothing overflows, however small the temperature; the clamp
    # keeps -inf - -inf out of rows in which nothing is allowed.
    scaled = logits - logits.amax(dim=-1, keepdim=True).clamp_(min=BANNED)
    scaled /= numbers[:, TEMPERATURE, None]
    if np.any(wishes & Wish.MIN_P):
        scaled.masked_fill_(scaled < numbers[:, MIN_P, None].log(), -torch.inf)
    return scaled


def keep_top(values: Tensor, scaled: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Apply top_k and top_p to each row's best tokens.

    values: [S, width], the largest of `scaled` [S, vocab], sorted. Returns values with what falls
    out set to -inf (the best always stays, and so does what equals the last one within), and [S]
    bool: whether the result is certain. It is not when more than `width` tokens may be needed.
    """
    width = values.shape[1]
    top_k, top_p = numbers[:, TOP_K, None], numbers[:, TOP_P, None]
    least = values.gather(1, top_k.clamp(max=width).long() - 1)
    kept = values.masked_fill(values < least, -torch.inf)
    farthest = values[:, -1:]
    all_in_view = (width == scaled.shape[1]) | (farthest == -torch.inf)
    all_in_view |= (top_k <= width) & (farthest < least)
    total = torch.where(
        all_in_view, kept.logsumexp(dim=-1, keepdim=True), scaled.logsumexp(dim=-1, keepdim=True)
    )
    probabilities = (kept - total).exp()
    outside = probabilities.cumsum(dim=-1) - probabilities >= top_p
    outside[:, 0].zero_()
    least = kept.masked_fill(outside, torch.inf).amin(dim=-1, keepdim=True)
    decided = all_in_view | ((top_k >= scaled.shape[1]) & (farthest < least))
    return kept.masked_fill_(kept < least, -torch.inf), decided.squeeze(1)
