"""Drafts: several positions of a request sampled in one step, behind guesses at its next tokens.

Each position draws its token as a step of its own would: with the noise of its place, and with the
drafts before it counted among the request's tokens. As long as a draft is what was drawn, the next
position's token is what the next step would have drawn; the first draw that is another token is the
last one of use. So drafts change how many steps an answer takes, and nothing else.
Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML 2023),
for drafts that one pass verifies; comparing draws in place of probabilities is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve.worker.device.device import Uploads
from serve.worker.sampling.sampling_columns import Rows

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Accepted:
    """Device tensors that tell which draws of a step are of use."""

    draws: Tensor  # [S] bool
    per_request: Tensor  # [R] int64, at least 1
    newest: Tensor  # [R] int64; where each request's last one of use stands among the S


class Drafts:
    """The S positions that a step samples of R requests, request by request."""

    def __init__(self, counts: Rows, next_ids: Rows, uploads: Uploads) -> None:
        """counts [R]: positions of each request; next_ids [S]: the draft behind each position,
        `NO_TOKEN` behind a request's last."""
        self.firsts = counts.cumsum() - counts  # [R] each request's first position
        self.owners = np.repeat(np.arange(len(counts)), counts)  # [S] whose each position is
        self._counts = counts
        self._next_ids = next_ids
        self._uploads = uploads
        self._num_before = np.arange(len(next_ids)) - self.firsts[self.owners]
        self._width = int(counts.max())

    def cut(self, drawn: list[int]) -> list[list[int]]:
        """Of the S drawn tokens, those of use, for each request."""
        next_ids, cut = self._next_ids.tolist(), []
        for first, count in zip(self.firsts.tolist(), self._counts.tolist(), strict=True):
            end = first + 1
            while end < first + count and drawn[end - 1] == next_ids[end - 1]:
                end += 1
            cut.append(drawn[first:end])
        return cut

    def accept(self, drawn: Tensor) -> Accepted:
        """The same for tokens [S] that the host does not know yet."""
        next_ids, owners, firsts, num_before = self._uploads.send(
            self._next_ids, self.owners, self.firsts, self._num_before
        )
        per_request = 1 + self.by_request(drawn == next_ids).long().cumprod(dim=1).sum(dim=1)
        return Accepted(
            draws=num_before < per_request[owners],
            per_request=per_request,
            newest=firsts + per_request - 1,
        )

    def by_request(self, values: Tensor) -> Tensor:
        """[S] → [R, most positions]; behind a request's own are others'."""
        index = self.firsts[:, None] + np.arange(self._width)
        (places,) = self._uploads.send(index.clip(max=len(self.owners) - 1))
        return values[places]

    def count(self, generated: Tensor, places: Rows) -> None:
        """Count the drafts before each of these positions in `generated` [P, vocab] int32."""
        before = self._before(places)
        at, which = np.nonzero((before >= 0) & (before < generated.shape[1]))
        rows, token_ids = self._uploads.send(at, before[at, which])
        one = torch.ones_like(token_ids, dtype=generated.dtype)
        generated.index_put_((rows, token_ids), one, accumulate=True)

    def follow(self, windows: Tensor, places: Rows) -> Tensor:
        """Each position's newest tokens [P, width], from those before the drafts."""
        before, counts = self._uploads.send(self._before(places), self._num_before[places])
        return shifted(windows, before, counts)

    def _before(self, places: Rows) -> Rows:
        """[P, most positions - 1]: the drafts before each position, `NO_TOKEN` behind them."""
        offsets = np.arange(self._width - 1)
        index = self.firsts[self.owners[places]][:, None] + offsets
        drafts = self._next_ids[index.clip(max=len(self._next_ids) - 1)]
        return np.where(offsets < self._num_before[places][:, None], drafts, NO_TOKEN)


def shifted(windows: Tensor, token_ids: Tensor, counts: Tensor) -> Tensor:
    """Windows [P, width] after the first `counts` [P] of the rows' token_ids [P, n]."""
    columns = torch.arange(windows.shape[1], device=windows.device) + counts[:, None]
    return torch.cat([windows, token_ids], dim=1).gather(1, columns)
