"""Copies of whole KV blocks: within the GPU, and to and from pinned host memory.

Shapes   src [2, N, …], dst [2, M, …], blocks of equal shape, each contiguous; ids [n] int64.
         A cache that keeps all layers of a block together ([2, N, layers, …]) moves in one launch.
Dtypes   any, equal.
Grid     [n, 2, pieces of a block].
Bytes    reads and writes 2 * n blocks; twice that within one tensor, where the blocks pass through
         a buffer so that all reads come before all writes. FLOPs: none.
Source   ours. A kernel reaches pinned memory through the GPU's own address space, which spares one
         copy command per block; other projects' swap paths do the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096


@triton.jit(do_not_specialize=["src_half_stride", "dst_half_stride"])
def block_copy_kernel(
    src_ptr,
    dst_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    src_half_stride,
    dst_half_stride,
    src_block_stride,
    dst_block_stride,
    BLOCK_ELEMENTS: tl.constexpr,
    PIECE: tl.constexpr,
):
    pair = tl.program_id(0)
    half = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    mask = elements < BLOCK_ELEMENTS
    src = src_ptr + half * src_half_stride + tl.load(src_ids_ptr + pair) * src_block_stride
    dst = dst_ptr + half * dst_half_stride + tl.load(dst_ids_ptr + pair) * dst_block_stride
    tl.store(dst + elements, tl.load(src + elements, mask=mask), mask=mask)


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """dst[:, dst_ids] = src[:, src_ids]; a tensor in host memory must be pinned."""
    assert src.dtype == dst.dtype, (src.dtype, dst.dtype)
    assert src.shape[0] == dst.shape[0] == 2, (src.shape, dst.shape)
    assert src.shape[2:] == dst.shape[2:], (src.shape, dst.shape)
    assert src_ids.shape == dst_ids.shape, (src_ids.shape, dst_ids.shape)
    for cache in (src, dst):
        assert cache[0, 0].is_contiguous(), cache.stride()
    device = dst.device if src.device.type == "cpu" else src.device
    if device.type != "cpu":  # else Triton's interpreter runs it
        for cache in (src, dst):
            assert cache.device.type != "cpu" or cache.is_pinned(), "host blocks must be pinned"
    src_ids, dst_ids = (ids.to(device, non_blocking=True) for ids in (src_ids, dst_ids))
    if src.data_ptr() == dst.data_ptr():
        order = torch.arange(len(src_ids), device=device)
        buffer = torch.empty((2, len(src_ids), *src.shape[2:]), dtype=src.dtype, device=device)
        _launch(src, buffer, src_ids, order)
        _launch(buffer, dst, order, dst_ids)
    else:
        _launch(src, dst, src_ids, dst_ids)


def _launch(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    block_elements = src.shape[2:].numel()
    grid = (len(src_ids), 2, triton.cdiv(block_elements, _PIECE))
    if not len(src_ids):
        return
    block_copy_kernel[grid](
        src,
        dst,
        src_ids,
        dst_ids,
        src.stride(0),
        dst.stride(0),
        src.stride(1),
        dst.stride(1),
        BLOCK_ELEMENTS=block_elements,
        PIECE=_PIECE,
        num_warps=4,
    )
