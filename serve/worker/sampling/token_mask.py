"""Token masks: packed bits that say which tokens a position may draw, as a grammar has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from serve.scheduler.output import SchedulerOutput
from serve.worker.executor import MASK_WORD_BITS, TokenMask


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Leave these rows [M] of logits [S, vocab] the tokens whose bits [M, ceil(vocab / 32)] int32
    are 1, and -inf for the others. In place."""
    shifts = torch.arange(MASK_WORD_BITS, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts) & 1
    excluded = allowed.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(excluded, -torch.inf)


def placed_in_batch(
    mask: TokenMask, plan: SchedulerOutput, request_ids: Sequence[str]
) -> TokenMask:
    """The mask by positions of the batch, which are those of `request_ids`; what it says of
    requests that are not in it, because a step of theirs failed, is left out."""
    firsts: dict[str, int] = {}
    for place, request_id in enumerate(request_ids):
        firsts.setdefault(request_id, place)
    places = [
        firsts[entry.request_id] + i if entry.request_id in firsts else -1
        for entry in plan.scheduled
        for i in range(entry.num_samples)
    ]
    rows = np.array(places, dtype=np.int64)[mask.rows]
    here = rows >= 0
    return TokenMask(rows[here], mask.bits[here])
