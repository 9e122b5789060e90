"""Store this step's keys and values in their slots of the paged cache.

Shapes   key, value [T, num_kv_heads, D]; kv [2, num_blocks, num_kv_heads, block_size, D];
         slot_mapping [T] int64 (block_id * block_size + offset). Padding points at the null block.
Dtypes   fp32, fp16, bf16, kept as they are, or divided by scales [2, num_kv_heads] fp32 and
         rounded to e4m3 (fp8.py).
Grid     [T, num_kv_heads]; a program moves one head of one token, key and value.
Bytes    reads and writes 2 * T * num_kv_heads * D elements each. FLOPs: none.
Source   PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.arguments import check_cache
from serve.kernels.triton.fp8 import narrow


@triton.jit
def kv_write_kernel(
    key_ptr,
    value_ptr,
    kv_ptr,
    scales_ptr,
    slot_mapping_ptr,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    kv_stride: tl.int64,  # so that a small pool and a large one are one variant
    block_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    mask = dims < HEAD_DIM
    slot = tl.load(slot_mapping_ptr + token)
    place = slot // BLOCK_SIZE * block_stride
    place += head * (BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
    key_scale, value_scale = 1.0, 1.0
    if HAS_SCALES:
        key_scale = tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + tl.num_programs(1) + head)
    element = kv_ptr.dtype.element_ty
    key = tl.load(key_ptr + token * key_stride + head * key_head_stride + dims, mask=mask)
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + dims, mask=mask)
    key = narrow(key, key_scale, element, HAS_SCALES)
    value = narrow(value, value_scale, element, HAS_SCALES)
    tl.store(kv_ptr + place + dims, key, mask=mask)
    tl.store(kv_ptr + kv_stride + place + dims, value, mask=mask)


def write_kv(
    key: Tensor,
    value: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Scatter T keys and values; one head of one token must be contiguous."""
    num_tokens, num_kv_heads, head_dim = key.shape
    check_cache(kv, head_dim, kv_scales)
    assert key.shape == value.shape, (key.shape, value.shape)
    assert kv.shape[2] == num_kv_heads, (kv.shape, num_kv_heads)
    assert key.stride(2) == value.stride(2) == 1, (key.stride(), value.stride())
    assert slot_mapping.shape == (num_tokens,), (slot_mapping.shape, num_tokens)
    assert slot_mapping.dtype == torch.int64, slot_mapping.dtype
    if num_tokens == 0:
        return
    kv_write_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        kv,
        kv_scales if kv_scales is not None else key,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv.stride(0),
        kv.stride(1),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=kv.shape[3],
        HAS_SCALES=kv_scales is not None,
        num_warps=1,
    )
