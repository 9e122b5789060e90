"""The draw of a token within top_k, top_p and min_p: its three launches.

How they come to a token, and what they read and write for it: sampling_kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.triton.launch import Launcher, cdiv
from serve.kernels.triton.sampling_kernels import (
    choose_kernel,
    scan_pieces_kernel,
    tile_maxima_kernel,
)

_TILE = 1024
_TILES_PER_PIECE = 8
_LISTED = 2048
"""Room in a row's list, in equal parts for its pieces."""

_tile_maxima = Launcher(tile_maxima_kernel)
_scan_pieces = Launcher(scan_pieces_kernel)
_choose = Launcher(choose_kernel)


def draw(logits: Tensor, controls: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """One token per row, after temperature, min_p, top_k and top_p, in this order; in `out` or new.

    Temperature 0 takes the most likely token. top_k >= V, top_p >= 1 and min_p 0 are off. Tokens
    as likely as the last one within top_k or top_p are within, too. Nothing comes back to the host.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == controls.dtype == torch.float32, (logits.dtype, controls.dtype)
    assert logits.stride(1) == controls.stride(1) == 1, (logits.stride(), controls.stride())
    assert controls.shape[0] == num_rows, (controls.shape, logits.shape)
    assert controls.shape[1] >= 4, controls.shape
    assert keys.shape == (num_rows, 2), (keys.shape, logits.shape)
    assert keys.dtype == torch.int32, keys.dtype
    assert keys.is_contiguous(), keys.stride()
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert out.shape == (num_rows,), (out.shape, num_rows)
    assert out.dtype == torch.int64, out.dtype
    assert out.is_contiguous(), out.stride()
    if num_rows:
        num_pieces = cdiv(vocab_size, _TILE * _TILES_PER_PIECE)
        num_tiles = num_pieces * _TILES_PER_PIECE
        room = _LISTED // _padded(num_pieces)
        new = logits.new_empty
        tiles = new((num_rows, 2, num_tiles))
        pieces, listed = new((num_rows, 4, num_pieces)), new((num_rows, 2, num_pieces, room))
        grid = (num_rows, num_pieces, 1)
        strides = (logits.stride(0), controls.stride(0))
        _tile_maxima(
            grid,
            (tiles, logits),
            strides[:1],
            (),
            (vocab_size, _TILE, _TILES_PER_PIECE),
            num_warps=8,
        )
        tensors = (out, pieces, listed, tiles, logits, controls, keys)
        sizes = (num_tiles, _padded(num_tiles))
        _scan_pieces(
            grid,
            tensors,
            strides,
            (),
            (vocab_size, _TILE * _TILES_PER_PIECE, room, *sizes),
            num_warps=8,
        )
        _choose(
            (num_rows, 1, 1),
            tensors,
            strides,
            (),
            (vocab_size, _TILE, room, num_pieces, _padded(num_pieces), *sizes),
            num_warps=8,
        )
    return out


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length()
