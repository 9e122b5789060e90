"""Decode attention with the context of each request split over several programs.

One token per request leaves a GPU idle when requests are few: R * num_kv_heads programs. Here a
request's keys are cut into S pieces that are attended side by side, and their partial results
merged exactly: each piece keeps its running maximum and sum, so merging is the same rescaling that
the loop over keys does anyway.

Shapes   as in attention.py, for the first `num_rows` requests, which have one token each; partial
         results [num_rows, num_heads, S, D] and [num_rows, num_heads, S, 2] fp32.
Dtypes   fp32, fp16, bf16, and e4m3 for the cache, as in attention.py; partial results fp32.
Grid     [num_kv_heads, num_rows, S], then [num_rows, num_heads] to merge (S > 1).
Bytes    each visible key and value once: 2 * num_kv_heads * D elements per position; merging moves
         8 * num_rows * num_heads * S * D bytes more.
FLOPs    4 * num_heads * D per position.
Source   Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); merge as in FlashAttention-2, section 3.1.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.base import AttentionMetadata
from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.online_softmax import LOG2_E, attend_keys, begin_rows, finish_rows
from serve.kernels.triton.tiles import Tile

MAX_SPLITS = 64
MIN_SPLIT_LEN = 256
"""Keys per split below which merging costs more than it saves."""
PROGRAMS_PER_MULTIPROCESSOR = 2
"""What fits side by side with the decode tiles' shared memory."""
GOOD_OCCUPANCY = 0.85


def plan_splits(
    meta: AttentionMetadata, num_kv_heads: int, window: int | None, multiprocessors: int
) -> tuple[int, int]:
    """(rows, splits): the leading rows for this file's kernels, the rest being the ragged one's.

    A step of single tokens is all ours. In a mixed step the single tokens are, if splitting helps
    them; otherwise none, because one launch beats two. Depends on sizes only, as captures need.
    """
    rows = meta.num_decode_rows
    if rows == 0:
        return 0, 1
    max_kv_len = min(meta.max_seq_len, window or meta.max_seq_len)
    splits = choose_num_splits(rows, num_kv_heads, max_kv_len, multiprocessors)
    if splits == 1 and rows < meta.seq_lens.shape[0]:
        return 0, 1
    return rows, splits


def choose_num_splits(
    num_rows: int, num_kv_heads: int, max_kv_len: int, multiprocessors: int
) -> int:
    """The split rule: the fewest splits (a power of two) that keep the GPU 85 % busy.

    P programs on N places take ceil(P / N) rounds, so P / (N * ceil(P / N)) of the places work.
    No split is shorter than 256 keys. If no number of splits is good, the best one.
    """
    places = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    best, best_occupancy = 1, 0.0
    splits = 1
    while splits <= MAX_SPLITS and (splits == 1 or max_kv_len >= splits * MIN_SPLIT_LEN):
        programs = num_rows * num_kv_heads * splits
        occupancy = programs / (places * math.ceil(programs / places))
        if occupancy >= GOOD_OCCUPANCY:
            return splits
        if occupancy > best_occupancy:
            best, best_occupancy = splits, occupancy
        splits *= 2
    return best


@triton.jit(do_not_specialize=["window", "softcap", "scale_log2"])
def decode_attention_kernel(
    out_ptr,  # the result if NUM_SPLITS is 1, else the pieces' results
    piece_state_ptr,  # the pieces' maxima and sums; unused if NUM_SPLITS is 1
    query_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    seq_lens_ptr,
    table_ptr,
    query_stride,
    query_head_stride,
    out_stride,
    kv_stride,
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
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # Mistral, Gemma
    HAS_SOFTCAP: tl.constexpr,  # Gemma 2
    HAS_SINKS: tl.constexpr,  # gpt-oss
    HAS_SCALES: tl.constexpr,  # an e4m3 cache
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    last_pos = seq_len - 1
    first_readable = 0
    if HAS_WINDOW:
        first_readable = tl.maximum(seq_len - window, 0)
    first_tile = first_readable // TILE_N
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, TILE_N) - first_tile, NUM_SPLITS)
    start = (first_tile + split * tiles_per_split) * TILE_N
    end = tl.minimum(start + tiles_per_split * TILE_N, seq_len)

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
    if NUM_SPLITS == 1:
        accumulator = finish_rows(accumulator, row_max, row_sum, sinks_ptr, head, live, HAS_SINKS)
        out_offsets = token * out_stride + head * HEAD_DIM
    else:
        piece = (token * (tl.num_programs(0) * GROUP) + head) * NUM_SPLITS + split
        tl.store(piece_state_ptr + piece * 2, row_max, mask=live)
        tl.store(piece_state_ptr + piece * 2 + 1, row_sum, mask=live)
        out_offsets = piece * HEAD_DIM
    dims = tl.arange(0, PADDED_DIM)
    out_ptrs = out_ptr + out_offsets[:, None] + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_pieces_kernel(
    out_ptr,
    pieces_ptr,
    piece_state_ptr,
    sinks_ptr,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    pieces = (token * tl.num_programs(1) + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    piece_max = tl.load(piece_state_ptr + pieces * 2)
    piece_sum = tl.load(piece_state_ptr + pieces * 2 + 1)
    mask = (dims < HEAD_DIM)[None, :]
    partial = tl.load(pieces_ptr + pieces[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

    highest = tl.max(piece_max, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    shrink = tl.exp2(piece_max - highest)
    total = tl.sum(piece_sum * shrink, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    result = tl.sum(partial * shrink[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + token * out_stride + head * HEAD_DIM + dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    arguments: AttentionArguments, out: Tensor, *, num_rows: int, num_splits: int, tile: Tile
) -> None:
    """Fill `out` for the first `num_rows` requests, each of which has one token."""
    a = arguments
    num_heads = a.query.shape[1]
    sinks = a.sinks if a.sinks is not None else a.query
    padded_dim = triton.next_power_of_2(a.head_dim)
    pieces, state = out, out
    if num_splits > 1:
        shape = (num_rows, num_heads, num_splits)
        pieces = torch.empty((*shape, a.head_dim), dtype=torch.float32, device=out.device)
        state = torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
    decode_attention_kernel[(a.num_kv_heads, num_rows, num_splits)](
        pieces,
        state,
        a.query,
        a.kv,
        a.kv_scales if a.kv_scales is not None else a.query,
        sinks,
        a.seq_lens,
        a.block_table,
        a.query.stride(0),
        a.query.stride(1),
        out.stride(0),
        a.kv.stride(0),
        a.kv.stride(1),
        a.block_table.stride(0),
        a.scale * math.log2(math.e),
        a.softcap or 0.0,
        a.window or 0,
        GROUP=a.group,
        HEAD_DIM=a.head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=a.block_size,
        BLOCK_M=max(tile.block_m, triton.next_power_of_2(a.group)),
        TILE_N=tile.tile_n,
        NUM_SPLITS=num_splits,
        HAS_WINDOW=a.window is not None,
        HAS_SOFTCAP=a.softcap is not None,
        HAS_SINKS=a.sinks is not None,
        HAS_SCALES=a.kv_scales is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        merge_pieces_kernel[(num_rows, num_heads)](
            out,
            pieces,
            state,
            sinks,
            out.stride(0),
            HEAD_DIM=a.head_dim,
            PADDED_DIM=padded_dim,
            NUM_SPLITS=num_splits,
            HAS_SINKS=a.sinks is not None,
            num_warps=4,
        )
