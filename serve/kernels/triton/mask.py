"""Token masks: -inf for what packed bits exclude, in some rows of logits.

Shapes   logits [S, V]; rows [M] int64; bits [M, ceil(V / 32)] int32, token t being bit t % 32 of
         number t // 32.
Dtypes   fp32.
Grid     [M, V / 1024].
Bytes    4 V written at most and V / 8 read for each masked row; logits are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.launch import Launcher, cdiv

_TILE = 1024


@triton.jit
def mask_kernel(
    logits_ptr,
    rows_ptr,
    bits_ptr,
    logits_stride,
    bits_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    masked = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens < VOCAB
    words = tl.load(bits_ptr + masked * bits_stride + tokens // 32, mask=inside, other=0)
    excluded = ((words >> (tokens % 32)) & 1) == 0
    row = tl.load(rows_ptr + masked)
    logit_ptrs = logits_ptr + row * logits_stride + tokens
    tl.store(logit_ptrs, tl.full([TILE], float("-inf"), tl.float32), mask=inside & excluded)


_mask = Launcher(mask_kernel)


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Leave these rows of logits, each named once, the tokens whose bits are 1. In place."""
    num_masked, vocab_size = len(rows), logits.shape[1]
    assert logits.dtype == torch.float32, logits.dtype
    assert rows.dtype == torch.int64, rows.dtype
    assert bits.dtype == torch.int32, bits.dtype
    assert bits.shape == (num_masked, cdiv(vocab_size, 32)), (bits.shape, logits.shape)
    assert logits.stride(1) == bits.stride(1) == 1, (logits.stride(), bits.stride())
    assert rows.is_contiguous(), rows.stride()
    if num_masked:
        _mask(
            (num_masked, cdiv(vocab_size, _TILE), 1),
            (logits, rows, bits),
            (logits.stride(0), bits.stride(0)),
            (),
            (vocab_size, _TILE),
            num_warps=4,
        )
