"""Who goes to the decode kernel in a step, and where its contexts are cut.

Pieces should be of about equal work, and as many as run side by side; both depend on the contexts'
lengths, and a recorded step has its lengths on the device only. So one program plans there, once a
step for all its layers.

Shapes   seq_lens [R]; a plan of P pieces, those of a request one after another: piece_start [R+1],
         piece_row [P] (-1: no piece), all int32.
Grid     one program. P depends on R only, as captures need.
Source   equal pieces: Stream-K (arXiv:2301.03598), here without pieces that span requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.base import AttentionMetadata
from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.launch import Launcher
from serve.kernels.triton.tiles import Tile

PIECE_COST = tl.constexpr(2)
"""What starting and ending a piece takes, in tiles of keys."""
MERGE_COST = tl.constexpr(0.25)
"""What merging takes per piece of the longest request, in tiles."""
_SHORT_CONTEXT = 1024
_ROWS_AT_ONCE = 64
_LENGTHS = 32
"""Lengths that a plan chooses from: 1, 2, 3, 4, 6, 8, 12, … 49152 tiles."""


def num_decode_rows(
    meta: AttentionMetadata, num_kv_heads: int, window: int | None, multiprocessors: int
) -> int:
    """The leading rows for the decode kernel, the rest being the ragged one's.

    A step of single tokens is all its. In a mixed step a few short ones go with the prompts,
    because one launch beats three: there each takes a whole multiprocessor, and is never cut.
    Depends on sizes only, as captures need.
    """
    rows = meta.num_decode_rows
    longest = min(meta.max_seq_len, window or meta.max_seq_len)
    few = rows * num_kv_heads <= multiprocessors // 2 and longest <= _SHORT_CONTEXT
    return 0 if few and rows < meta.seq_lens.shape[0] else rows


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "num_kv_heads", "places", "window"])
def plan_pieces_kernel(
    piece_start_ptr,
    piece_row_ptr,
    seq_lens_ptr,
    num_rows,
    num_pieces,  # room for them
    num_kv_heads,
    places,  # programs that run side by side
    window,  # 0: none
    TILE_N: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Choose the piece length whose rounds of programs, each as long as a piece, end first."""
    index = tl.arange(0, LENGTHS)
    lengths = ((2 + (index & 1)) << (index >> 1)) >> 1
    pieces = tl.zeros([LENGTHS], tl.int32)
    longest = 1
    for start in tl.range(0, num_rows, ROWS):
        tiles = row_tiles(seq_lens_ptr, start, num_rows, window, TILE_N, ROWS)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        pieces += tl.sum((tiles[:, None] + lengths[None, :] - 1) // lengths[None, :], 0)
    rounds = (pieces * num_kv_heads + places - 1) // places
    walked = tl.minimum(lengths, longest) + PIECE_COST
    merged = (longest + lengths - 1) // lengths * MERGE_COST
    cost = tl.where(pieces <= num_pieces, rounds * walked + merged, float("inf"))
    cheapest = tl.min(cost, 0)
    length = tl.max(tl.where(cost == cheapest, lengths, 0), 0)

    total = 0
    for start in tl.range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < num_rows
        tiles = row_tiles(seq_lens_ptr, start, num_rows, window, TILE_N, ROWS)
        count = (tiles + length - 1) // length
        first = total + tl.cumsum(count, 0) - count
        tl.store(piece_start_ptr + row, first, mask=inside)
        for piece in tl.range(0, tl.max(count, 0)):
            tl.store(piece_row_ptr + first + piece, row, mask=inside & (piece < count))
        total += tl.sum(count, 0)
    tl.store(piece_start_ptr + num_rows, total)
    for start in tl.range(total, num_pieces, ROWS):
        piece = start + tl.arange(0, ROWS)
        tl.store(piece_row_ptr + piece, -1, mask=piece < num_pieces)


@triton.jit
def row_tiles(seq_lens_ptr, start, num_rows, window, TILE_N: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS] tiles that each row's token sees, at least 1; 0 past the last row."""
    row = start + tl.arange(0, ROWS)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    first_tile = tl.where(window > 0, tl.maximum(seq_len - window, 0) // TILE_N, 0)
    tiles = tl.maximum((seq_len + TILE_N - 1) // TILE_N - first_tile, 1)
    return tl.where(row < num_rows, tiles, 0)


_plan_pieces = Launcher(plan_pieces_kernel)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the contexts of a step's first rows are cut, and room for the pieces' results."""

    num_rows: int
    piece_start: Tensor  # [R+1]
    piece_row: Tensor  # [P]
    pieces: Tensor  # [P, num_heads, D] fp32; of one layer after another
    state: Tensor  # [P, num_heads, 2] fp32


def plan_decode(
    arguments: AttentionArguments, *, num_rows: int, tile: Tile, multiprocessors: int
) -> DecodePlan:
    """Good for every layer of the step with the same window and heads."""
    a = arguments
    device, places = a.query.device, multiprocessors * tile.per_multiprocessor
    num_pieces = num_rows + max(2 * places // a.num_kv_heads, 1)
    start, rows = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (num_rows + 1, num_pieces)
    )
    shape = (num_pieces, a.query.shape[1])
    pieces, state = (
        torch.empty((*shape, size), dtype=torch.float32, device=device) for size in (a.head_dim, 2)
    )
    _plan_pieces(
        (1, 1, 1),
        (start, rows, a.seq_lens),
        (),
        (num_rows, num_pieces, a.num_kv_heads, places, a.window or 0),
        (tile.tile_n, _ROWS_AT_ONCE, _LENGTHS),
        num_warps=4,
    )
    return DecodePlan(num_rows, start, rows, pieces, state)
