"""Rotary position embedding, in place on queries and keys.

Shapes   query [T, num_heads, D], key [T, num_kv_heads, D], which may be slices of one projection;
         cos_sin [max_len, rotary_dim] fp32, cosines first; positions [T] int64. Every kind of RoPE
         is a different table. Dims from rotary_dim on are left as they are.
Dtypes   fp32, fp16, bf16; the rotation in fp32.
Grid     [T, groups of query heads + groups of key heads].
Bytes    reads and writes rotary_dim of every head once. FLOPs: 3 per element.
Source   RoFormer (arXiv:2104.09864), with halves paired instead of neighbours, as GPT-NeoX does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS_PER_PROGRAM = 8


@triton.jit
def rotary_kernel(
    query_ptr,
    key_ptr,
    cos_sin_ptr,
    positions_ptr,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    base = query_ptr + token * query_stride
    head_stride = query_head_stride
    num_heads = NUM_HEADS
    if group >= QUERY_GROUPS:
        base = key_ptr + token * key_stride
        head_stride = key_head_stride
        num_heads = NUM_KV_HEADS
        group -= QUERY_GROUPS

    position = tl.load(positions_ptr + token)
    dims = tl.arange(0, PADDED_HALF)
    table_ptr = cos_sin_ptr + position * (2 * HALF)
    cos = tl.load(table_ptr + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(table_ptr + HALF + dims, mask=dims < HALF, other=0.0)[None, :]

    heads = group * HEADS + tl.arange(0, HEADS)
    mask = (heads < num_heads)[:, None] & (dims < HALF)[None, :]
    first_ptrs = base + (heads * head_stride)[:, None] + dims[None, :]
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    element = query_ptr.dtype.element_ty
    tl.store(first_ptrs, (first * cos - second * sin).to(element), mask=mask)
    tl.store(first_ptrs + HALF, (second * cos + first * sin).to(element), mask=mask)


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both in place and return them."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, rotary_dim = key.shape[1], cos_sin.shape[1]
    assert (key.shape[0], key.shape[2]) == (num_tokens, head_dim), (query.shape, key.shape)
    assert query.dtype == key.dtype, (query.dtype, key.dtype)
    assert query.stride(2) == key.stride(2) == 1, (query.stride(), key.stride())
    assert rotary_dim <= head_dim, (rotary_dim, head_dim)
    assert rotary_dim % 2 == 0, rotary_dim
    assert cos_sin.dtype == torch.float32, cos_sin.dtype
    assert cos_sin.is_contiguous(), cos_sin.stride()
    assert positions.shape == (num_tokens,), (positions.shape, num_tokens)
    groups = triton.cdiv(num_heads, _HEADS_PER_PROGRAM)
    groups += triton.cdiv(num_kv_heads, _HEADS_PER_PROGRAM)
    if num_tokens:
        rotary_kernel[(num_tokens, groups)](
            query,
            key,
            cos_sin,
            positions,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=rotary_dim // 2,
            PADDED_HALF=triton.next_power_of_2(rotary_dim // 2),
            HEADS=_HEADS_PER_PROGRAM,
            num_warps=2,
        )
    return query, key
