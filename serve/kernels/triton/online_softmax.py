"""What the ragged and the split-KV kernel share: how rows begin, fold in keys, and end.

Device functions only: they are inlined into the kernels that call them. Scores are kept in base 2
(`scale_log2` = scale * log2 e), because exp2 is one instruction.
Source: FlashAttention-2, algorithm 1 (arXiv:2307.08691); paging: arXiv:2309.06180.
"""

from __future__ import annotations

import triton
import triton.language as tl

from serve.kernels.triton.fp8 import widen

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Starting maximum: finite, so that a row with nothing visible yet never computes inf - inf."""


@triton.jit
def begin_rows(
    query_ptr,
    scales_ptr,
    token,  # [M] int64, or one for all rows: index among the step's tokens
    head,  # [M] query head of each row
    kv_head,
    live,  # [M] which rows are no padding
    query_stride,
    query_head_stride,
    scale_log2,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """(query [M, D], accumulator [M, D], row_max [M], row_sum [M], scale_log2 for these keys)."""
    dims = tl.arange(0, PADDED_DIM)
    offsets = token * query_stride + head * query_head_stride
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        scale_log2 *= tl.load(scales_ptr + kv_head)
    accumulator = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    return query, accumulator, row_max, tl.zeros([BLOCK_M], tl.float32), scale_log2


@triton.jit
def attend_keys(
    query,  # [M, D] rows of one KV head's query heads
    query_pos,  # [M] absolute position of each row's token
    accumulator,  # [M, D] fp32
    row_max,  # [M] fp32, base 2
    row_sum,  # [M] fp32
    key_ptr,  # this KV head's keys in block 0
    value_ptr,
    table_ptr,  # this request's block ids
    first_tile,  # key positions [first_tile, end) are walked, TILE_N at a time
    end,
    first_readable,  # positions before it may hold anything, NaN too
    block_stride,
    scale_log2,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    MASKED: tl.constexpr,  # False where the caller knows that every row sees every key
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Fold the keys of [first_tile, end) into the running softmax of every row."""
    dims = tl.arange(0, PADDED_DIM)
    for tile in tl.range(first_tile, end, TILE_N):
        key_pos = tile + tl.arange(0, TILE_N)
        readable = (key_pos >= first_readable) & (key_pos < end)
        block_ids = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=readable, other=0)
        slots = block_ids.to(tl.int64) * block_stride + (key_pos % BLOCK_SIZE) * HEAD_DIM
        offsets = slots[:, None] + dims[None, :]
        mask = readable[:, None] & (dims < HEAD_DIM)[None, :]
        key = widen(tl.load(key_ptr + offsets, mask=mask, other=0.0), query)
        value = widen(tl.load(value_ptr + offsets, mask=mask, other=0.0), query)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if HAS_SOFTCAP:
            scores = soft_cap(scores, softcap * LOG2_E)
        if MASKED:
            visible = (key_pos[None, :] <= query_pos[:, None]) & readable[None, :]
            if HAS_WINDOW:
                visible = visible & (key_pos[None, :] > query_pos[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(
            weights.to(query.dtype), value, acc=accumulator, input_precision="ieee"
        )
        row_max = new_max
    return accumulator, row_max, row_sum


@triton.jit
def soft_cap(scores, cap):
    """cap * tanh(scores / cap), by an exponential that cannot overflow."""
    decay = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / cap))
    capped = cap * (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def finish_rows(
    accumulator,
    row_max,
    row_sum,
    sinks_ptr,
    head,
    live,
    HAS_SINKS: tl.constexpr,
):
    """Divide by the softmax denominator, to which a sink adds one term that has no value vector.

    A row that saw nothing (padding) gives zeros.
    """
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        new_max = tl.maximum(row_max, sink)
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.exp2(sink - new_max)
        accumulator = accumulator * shrink[:, None]
    return accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
