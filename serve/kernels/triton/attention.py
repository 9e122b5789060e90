"""Ragged paged attention: prefills, chunks and decodes of one step in one launch.

Shapes   query, out [T, num_heads, D]; kv [2, num_blocks, num_kv_heads, block_size, D];
         query_start_loc [R+1], seq_lens [R], block_table [R, max_blocks] int32; sinks [num_heads].
Dtypes   fp32, fp16, bf16; the cache has the query's, or e4m3 with scales [2, num_kv_heads] fp32
         (fp8.py); softmax and sums in fp32.
Tile     One program owns BLOCK_M rows = (BLOCK_M // G) tokens x the G query heads of one KV head,
         so that each key is read once per group and not once per head; it walks the visible keys
         TILE_N at a time, whatever the block size is.
Grid     [T // BLOCK_Q + R, num_kv_heads]: depends on sizes only, never on lengths, so a captured
         launch stays valid. A program finds its request by bisection over query_start_loc.
Bytes    every visible key and value once per query tile of its request (decode: once).
FLOPs    4 * num_heads * D per visible (query, key) pair.
Source   FlashAttention-2 (arXiv:2307.08691), PagedAttention (2309.06180); tiles packed over GQA
         heads and cut loose from the block size: The Anatomy of a Triton Attention Kernel
         (2511.11581).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.launch import Launcher
from serve.kernels.triton.online_softmax import attend_keys, begin_rows, finish_rows
from serve.kernels.triton.tiles import Tile


# A step's sizes and its longest context (table_stride) must not choose another variant: it would be
# compiled while streams wait, and batch-invariant results could come from two compilations.
@triton.jit(
    do_not_specialize=["first_row", "num_rows", "table_stride", "window", "softcap", "scale_log2"]
)
def ragged_attention_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    query_stride,
    query_head_stride,
    out_stride,
    kv_stride: tl.int64,  # so that a small pool and a large one are one variant
    block_stride,
    table_stride,
    first_row,
    num_rows,
    scale_log2,
    softcap,
    window,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # Mistral, Gemma
    HAS_SOFTCAP: tl.constexpr,  # Gemma 2
    HAS_SINKS: tl.constexpr,  # gpt-oss
    HAS_SCALES: tl.constexpr,  # an e4m3 cache
    ALWAYS_MASK: tl.constexpr,  # batch-invariant mode: one code path for every tile
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    # Late tiles see the most keys; starting them first leaves short ones to fill the tail.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)

    first_token = tl.load(query_start_ptr + first_row)
    low = 0  # the last row whose first tile is at or before this one
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_ptr + first_row + middle) - first_token
        if start // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    row = first_row + low
    query_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - query_start
    first_query = (tile - ((query_start - first_token) // BLOCK_Q + low)) * BLOCK_Q
    if first_query >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + row)
    context_len = seq_len - query_len
    rows = tl.arange(0, BLOCK_M)
    token = first_query + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (rows < BLOCK_Q * GROUP) & (token < query_len)
    token_index = (query_start + token).to(tl.int64)
    query, accumulator, row_max, row_sum, scale_log2 = begin_rows(
        query_ptr, scales_ptr, token_index, head, kv_head, live,
        query_stride, query_head_stride, scale_log2,
        BLOCK_M, HEAD_DIM, PADDED_DIM, HAS_SCALES,
    )  # fmt: skip

    first_pos = context_len + first_query
    last_pos = tl.minimum(first_pos + BLOCK_Q, seq_len) - 1
    end = last_pos + 1
    first_readable = 0
    if HAS_WINDOW:
        first_readable = tl.maximum(first_pos - window + 1, 0)
    first_tile = first_readable // TILE_N * TILE_N  # aligned, so a key is always in the same tile
    masked_from = first_tile
    if not (HAS_WINDOW or ALWAYS_MASK):
        masked_from = (first_pos + 1) // TILE_N * TILE_N

    key_ptr = kv_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    row_table_ptr = table_ptr + row.to(tl.int64) * table_stride
    if not (HAS_WINDOW or ALWAYS_MASK):
        accumulator, row_max, row_sum = attend_keys(
            query, context_len + token, accumulator, row_max, row_sum,
            key_ptr, key_ptr + kv_stride, row_table_ptr,
            first_tile, masked_from, first_readable,
            block_stride, scale_log2, softcap, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_N, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    accumulator, row_max, row_sum = attend_keys(
        query, context_len + token, accumulator, row_max, row_sum,
        key_ptr, key_ptr + kv_stride, row_table_ptr,
        masked_from, end, first_readable,
        block_stride, scale_log2, softcap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_N, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip

    result = finish_rows(accumulator, row_max, row_sum, sinks_ptr, head, live, HAS_SINKS)
    if HAS_SCALES:
        result *= tl.load(scales_ptr + tl.num_programs(1) + kv_head)
    dims = tl.arange(0, PADDED_DIM)
    out_offsets = token_index * out_stride + head * HEAD_DIM
    out_ptrs = out_ptr + out_offsets[:, None] + dims[None, :]
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


_attend = Launcher(ragged_attention_kernel)


def ragged_attention(
    arguments: AttentionArguments, out: Tensor, *, first_row: int, tile: Tile, always_mask: bool
) -> None:
    """Fill `out` for the rows from `first_row` on. The arguments were checked when made."""
    a = arguments
    num_rows = a.seq_lens.shape[0] - first_row
    block_m = max(tile.block_m, a.padded_group)
    num_tiles = (a.query.shape[0] - first_row) // (block_m // a.group) + num_rows
    _attend(
        (num_tiles, a.num_kv_heads, 1),
        (
            out,
            a.query,
            a.kv,
            a.kv_scales if a.kv_scales is not None else a.query,
            a.sinks if a.sinks is not None else a.query,
            a.query_start_loc,
            a.seq_lens,
            a.block_table,
        ),
        (*a.query.stride()[:2], out.stride(0), *a.kv.stride()[:2]),
        (
            a.block_table.stride(0),
            first_row,
            num_rows,
            a.scale * math.log2(math.e),
            a.softcap or 0.0,
            a.window or 0,
        ),
        (
            a.group,
            a.head_dim,
            a.padded_dim,
            a.block_size,
            block_m,
            tile.tile_n,
            a.window is not None,
            a.softcap is not None,
            a.sinks is not None,
            a.kv_scales is not None,
            always_mask,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
