"""Decode attention with the contexts cut into pieces of about equal work.

One token per request leaves a GPU idle when requests are few or one is long: a program walks a
context tile by tile. Here contexts are cut into pieces that are attended side by side, and partial
results merged exactly: each piece keeps its running maximum and sum, so merging is the same
rescaling that the loop over keys does anyway. decode_plan.py says where to cut.

Shapes   as in attention.py, for the first R requests, which have one token each; partial results of
         a plan's P pieces [P, num_heads, D] and [P, num_heads, 2] fp32.
Dtypes   fp32, fp16, bf16, and e4m3 for the cache, as in attention.py; partial results fp32.
Grid     [num_kv_heads, P]; [R, num_heads] to merge.
Bytes    each visible key and value once: 2 * num_kv_heads * D elements per position; merging moves
         8 * num_heads * D bytes per piece of a cut request more.
FLOPs    4 * num_heads * D per position.
Source   Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); merge as in FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.decode_plan import DecodePlan
from serve.kernels.triton.launch import Launcher
from serve.kernels.triton.online_softmax import (
    LOG2_E,
    LOWEST,
    attend_keys,
    begin_rows,
    finish_rows,
)
from serve.kernels.triton.tiles import Tile

_PIECES_AT_ONCE = 16


@triton.jit(do_not_specialize=["table_stride", "window", "softcap", "scale_log2"])
def decode_attention_kernel(
    out_ptr,
    pieces_ptr,  # results of the pieces of cut rows
    piece_state_ptr,  # and their maxima and sums
    query_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    seq_lens_ptr,
    table_ptr,
    piece_start_ptr,
    piece_row_ptr,
    query_stride,
    query_head_stride,
    out_stride,
    kv_stride: tl.int64,  # so that a small pool and a large one are one variant
    block_stride,
    table_stride,
    scale_log2,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least 16, the smallest matrix product
    TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # Mistral, Gemma
    HAS_SOFTCAP: tl.constexpr,  # Gemma 2
    HAS_SINKS: tl.constexpr,  # gpt-oss
    HAS_SCALES: tl.constexpr,  # an e4m3 cache
):
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(piece_row_ptr + piece)
    if row < 0:
        return
    first_piece = tl.load(piece_start_ptr + row)
    num_pieces = tl.load(piece_start_ptr + row + 1) - first_piece
    seq_len = tl.load(seq_lens_ptr + row)
    last_pos = seq_len - 1
    first_readable = 0
    if HAS_WINDOW:
        first_readable = tl.maximum(seq_len - window, 0)
    first_tile = first_readable // TILE_N
    tiles_per_piece = tl.cdiv(tl.cdiv(seq_len, TILE_N) - first_tile, num_pieces)
    start = (first_tile + (piece - first_piece) * tiles_per_piece) * TILE_N
    end = tl.minimum(start + tiles_per_piece * TILE_N, seq_len)

    group_row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + group_row
    live = group_row < GROUP
    token = row.to(tl.int64)
    query, accumulator, row_max, row_sum, scale_log2 = begin_rows(
        query_ptr, scales_ptr, token, head, kv_head, live,
        query_stride, query_head_stride, scale_log2,
        BLOCK_M, HEAD_DIM, PADDED_DIM, HAS_SCALES,
    )  # fmt: skip

    key_ptr = kv_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    accumulator, row_max, row_sum = attend_keys(
        query, tl.full([BLOCK_M], last_pos, tl.int32), accumulator, row_max, row_sum,
        key_ptr, key_ptr + kv_stride, table_ptr + token * table_stride,
        start, end, first_readable,
        block_stride, scale_log2, softcap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_N, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip

    if HAS_SCALES:
        accumulator *= tl.load(scales_ptr + tl.num_programs(0) + kv_head)
    dims = tl.arange(0, PADDED_DIM)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if num_pieces == 1:
        result = finish_rows(accumulator, row_max, row_sum, sinks_ptr, head, live, HAS_SINKS)
        out_ptrs = out_ptr + (token * out_stride + head * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        place = piece.to(tl.int64) * (tl.num_programs(0) * GROUP) + head
        tl.store(piece_state_ptr + place * 2, row_max, mask=live)
        tl.store(piece_state_ptr + place * 2 + 1, row_sum, mask=live)
        piece_ptrs = pieces_ptr + (place * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(piece_ptrs, accumulator, mask=mask)


@triton.jit
def merge_pieces_kernel(
    out_ptr,
    pieces_ptr,
    piece_state_ptr,
    sinks_ptr,
    piece_start_ptr,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PIECES: tl.constexpr,  # taken in at once
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(piece_start_ptr + row)
    end = tl.load(piece_start_ptr + row + 1)
    if end - first == 1:
        return
    dims = tl.arange(0, PADDED_DIM)
    result = tl.zeros([PADDED_DIM], tl.float32)
    highest = LOWEST
    total = 0.0
    if HAS_SINKS:
        highest = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = 1.0
    for start in tl.range(first, end, PIECES):
        piece = start + tl.arange(0, PIECES)
        inside = piece < end
        place = piece.to(tl.int64) * tl.num_programs(1) + head
        piece_max = tl.load(piece_state_ptr + place * 2, mask=inside, other=LOWEST)
        piece_sum = tl.load(piece_state_ptr + place * 2 + 1, mask=inside, other=0.0)
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        ptrs = pieces_ptr + (place * HEAD_DIM)[:, None] + dims[None, :]
        partial = tl.load(ptrs, mask=mask, other=0.0)
        new_highest = tl.maximum(highest, tl.max(piece_max, 0))
        weights = tl.exp2(piece_max - new_highest)
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(piece_sum * weights, 0)
        result = result * shrink + tl.sum(partial * weights[:, None], 0)
        highest = new_highest
    result = result / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + row.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


_attend_pieces = Launcher(decode_attention_kernel)
_merge_pieces = Launcher(merge_pieces_kernel)


def decode_attention(
    arguments: AttentionArguments, out: Tensor, plan: DecodePlan, *, tile: Tile
) -> None:
    """Fill `out` for the planned requests, each of which has one token."""
    a = arguments
    sinks = a.sinks if a.sinks is not None else a.query
    padded_dim = a.padded_dim
    _attend_pieces(
        (a.num_kv_heads, plan.piece_row.shape[0], 1),
        (
            out,
            plan.pieces,
            plan.state,
            a.query,
            a.kv,
            a.kv_scales if a.kv_scales is not None else a.query,
            sinks,
            a.seq_lens,
            a.block_table,
            plan.piece_start,
            plan.piece_row,
        ),
        (*a.query.stride()[:2], out.stride(0), *a.kv.stride()[:2]),
        (a.block_table.stride(0), a.scale * math.log2(math.e), a.softcap or 0.0, a.window or 0),
        (
            a.group,
            a.head_dim,
            padded_dim,
            a.block_size,
            max(tile.block_m, a.padded_group),
            tile.tile_n,
            a.window is not None,
            a.softcap is not None,
            a.sinks is not None,
            a.kv_scales is not None,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _merge_pieces(
        (plan.num_rows, a.query.shape[1], 1),
        (out, plan.pieces, plan.state, sinks, plan.piece_start),
        (out.stride(0),),
        (),
        (a.head_dim, padded_dim, _PIECES_AT_ONCE, a.sinks is not None),
        num_warps=4,
    )
