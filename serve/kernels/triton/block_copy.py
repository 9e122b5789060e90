"""Copies of whole KV blocks: within the GPU, and to and from pinned host memory.

Shapes   src [P, N, …], dst [P, M, …], blocks of equal shape, each contiguous; ids [n] int64. P is
         2 * layers, the keys and the values of each, so that all layers move in one launch.
Dtypes   any, equal.
Grid     [n, P, pieces of a block].
Bytes    reads and writes P * n blocks; twice that where a block within one tensor is both read and
         written: then they pass through a buffer, so that all reads come before all writes.
         FLOPs: none.
Loads    16 bytes each: all strides are multiples of 16 elements, and Triton must be left to see.
Source   ours. A kernel reaches pinned memory through the GPU's own address space, which spares one
         copy command per block; other projects' swap paths do the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096


@triton.jit(do_not_specialize_on_alignment=["src_ids_ptr", "dst_ids_ptr"])
def block_copy_kernel(
    src_ptr,
    dst_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    src_part_stride: tl.int64,
    dst_part_stride: tl.int64,
    src_block_stride,
    dst_block_stride,
    BLOCK_ELEMENTS: tl.constexpr,
    PIECE: tl.constexpr,
):
    pair = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    mask = elements < BLOCK_ELEMENTS
    src = src_ptr + part * src_part_stride + tl.load(src_ids_ptr + pair) * src_block_stride
    dst = dst_ptr + part * dst_part_stride + tl.load(dst_ids_ptr + pair) * dst_block_stride
    tl.store(dst + elements, tl.load(src + elements, mask=mask), mask=mask)


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """dst[:, dst_ids] = src[:, src_ids]; ids are in host memory, and so may be src or dst, which
    must then be pinned."""
    assert src.dtype == dst.dtype, (src.dtype, dst.dtype)
    assert src.shape[0] == dst.shape[0], (src.shape, dst.shape)
    assert src.shape[2:] == dst.shape[2:], (src.shape, dst.shape)
    assert src_ids.shape == dst_ids.shape, (src_ids.shape, dst_ids.shape)
    for cache in (src, dst):
        assert cache[0, 0].is_contiguous(), cache.stride()
    device = dst.device if src.device.type == "cpu" else src.device
    on_gpu = device.type != "cpu"  # else Triton's interpreter runs it
    if on_gpu:
        for cache in (src, dst):
            assert cache.device.type != "cpu" or cache.is_pinned(), "host blocks must be pinned"
    if not len(src_ids):
        return
    if src.dtype.itemsize == 1:
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)  # a type that every GPU knows
    rewritten = src.data_ptr() == dst.data_ptr() and bool(torch.isin(src_ids, dst_ids).any())
    ids = torch.stack([src_ids, dst_ids])
    if on_gpu:
        ids = ids.pin_memory().to(device, non_blocking=True)
    if rewritten:
        order = torch.arange(len(src_ids), device=device)
        shape = (src.shape[0], len(src_ids), *src.shape[2:])
        buffer = torch.empty(shape, dtype=src.dtype, device=device)
        _launch(src, buffer, ids[0], order)
        _launch(buffer, dst, order, ids[1])
    else:
        _launch(src, dst, ids[0], ids[1])


def _launch(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    block_elements = src.shape[2:].numel()
    grid = (len(src_ids), src.shape[0], triton.cdiv(block_elements, _PIECE))
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
