"""From a fused projection to attention in one launch: head norms, rotation, cache write.

Shapes   heads [T, num_heads + 2 * num_kv_heads, D]: queries, keys, values of one projection;
         norm weights [D] (Qwen 3, Gemma 3); cos_sin [max_len, rotary_dim] fp32; positions, slots
         [T] int64; kv as in kv_write.py → queries [T, num_heads, D]. `heads` is left as it was.
Dtypes   fp32, fp16, bf16; norms and rotation in fp32, each rounded as the single kernels round it,
         so that the results are theirs bit for bit; an e4m3 cache as in fp8.py.
Grid     [T, groups of query heads + groups of key heads + groups of value heads].
Bytes    reads every head once (a rotated half a second time, from cache) and writes it once; the
         three or five launches it replaces move 2 to 3 times as much.
FLOPs    about 8 per element of queries and keys.
Source   norm.py, rope.py and kv_write.py in one pass; queries are not rotated in place, because a
         warp could overwrite what another still has to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.base import HeadNorms
from serve.kernels.triton.arguments import check_cache
from serve.kernels.triton.fp8 import narrow
from serve.kernels.triton.launch import Launcher, cdiv

_HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize=["eps"])
def prepare_heads_kernel(
    out_ptr,
    heads_ptr,
    kv_ptr,
    scales_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    token_stride,
    kv_stride: tl.int64,  # so that a small pool and a large one are one variant
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the rotated dims
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
    HAS_NORMS: tl.constexpr,  # Qwen 3, Gemma 3
    HAS_SCALES: tl.constexpr,  # an e4m3 cache
):
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    table_ptr = cos_sin_ptr + position * (2 * HALF)
    dims = tl.arange(0, PADDED_DIM)
    token_ptr = heads_ptr + token * token_stride

    if group < QUERY_GROUPS:
        head = group * HEADS + tl.arange(0, HEADS)
        mask = (head < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        query = turned_heads(
            token_ptr + head * HEAD_DIM, mask, dims, query_norm_ptr, table_ptr, eps,
            HEAD_DIM, HALF, HAS_NORMS,
        )  # fmt: skip
        out = out_ptr + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
        tl.store(out[:, None] + dims[None, :], query, mask=mask)
        return

    kind = (group - QUERY_GROUPS) // KV_GROUPS  # 0: keys, 1: values
    head = (group - QUERY_GROUPS) % KV_GROUPS * HEADS + tl.arange(0, HEADS)
    mask = (head < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    head_ptrs = token_ptr + (NUM_HEADS + kind * NUM_KV_HEADS + head) * HEAD_DIM
    if kind == 0:
        kept = turned_heads(
            head_ptrs, mask, dims, key_norm_ptr, table_ptr, eps, HEAD_DIM, HALF, HAS_NORMS
        )
    else:
        kept = tl.load(head_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    scale = tl.full([HEADS], 1.0, tl.float32)
    if HAS_SCALES:
        scale = tl.load(
            scales_ptr + kind * NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=1.0
        )
    slot = tl.load(slot_mapping_ptr + token)
    place = kind * kv_stride + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM
    kv_ptrs = kv_ptr + place + head * (BLOCK_SIZE * HEAD_DIM)
    stored = narrow(kept, scale[:, None], kv_ptr.dtype.element_ty, HAS_SCALES)
    tl.store(kv_ptrs[:, None] + dims[None, :], stored, mask=mask)


@triton.jit
def turned_heads(
    head_ptrs,  # [HEADS]
    mask,  # [HEADS, D]
    dims,
    norm_ptr,
    table_ptr,  # this position's cosines, then its sines
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Heads after norm and rotation, in their own dtype."""
    # Each element beside the one that it is rotated with.
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    x = tl.load(head_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    other = tl.load(head_ptrs[:, None] + partner[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    if HAS_NORMS:
        wide = x.to(tl.float32)
        inverse = (1.0 / tl.sqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps))[:, None]
        inside = dims < HEAD_DIM
        weight = tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        x = (wide * inverse * weight[None, :]).to(dtype)
        other = (other.to(tl.float32) * inverse * other_weight[None, :]).to(dtype)
    rotated = dims < 2 * HALF
    cos = tl.load(table_ptr + dims % HALF, mask=rotated, other=1.0)
    sin = tl.load(table_ptr + HALF + dims % HALF, mask=rotated, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    x = x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]
    return x.to(dtype)


_prepare = Launcher(prepare_heads_kernel)


def prepare_heads(
    heads: Tensor,
    num_heads: int,
    norms: HeadNorms | None,
    rope: tuple[Tensor, Tensor],
    kv: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Queries [T, num_heads, D], ready to attend; keys and values go to their slots."""
    num_tokens, all_heads, head_dim = heads.shape
    num_kv_heads = (all_heads - num_heads) // 2
    cos_sin, positions = rope
    check_cache(kv, head_dim, kv_scales)
    assert kv_scales is not None or kv.dtype == heads.dtype, (kv.dtype, heads.dtype)
    assert num_heads + 2 * num_kv_heads == all_heads, (num_heads, heads.shape)
    assert kv.shape[2] == num_kv_heads, (kv.shape, num_kv_heads)
    assert heads.stride()[1:] == (head_dim, 1), heads.stride()
    assert cos_sin.dtype == torch.float32, cos_sin.dtype
    assert cos_sin.is_contiguous(), cos_sin.stride()
    assert cos_sin.shape[1] % 2 == 0, cos_sin.shape
    assert cos_sin.shape[1] <= head_dim, (cos_sin.shape, head_dim)
    for index in (positions, slot_mapping):
        assert index.shape == (num_tokens,), (index.shape, num_tokens)
        assert index.dtype == torch.int64, index.dtype
    for weight in (norms.query, norms.key) if norms else ():
        assert weight.shape == (head_dim,), (weight.shape, head_dim)
        assert weight.is_contiguous(), weight.stride()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=heads.dtype, device=heads.device)
    groups = cdiv(num_heads, _HEADS_PER_PROGRAM) + 2 * cdiv(num_kv_heads, _HEADS_PER_PROGRAM)
    if num_tokens:
        _prepare(
            (num_tokens, groups, 1),
            (
                out,
                heads,
                kv,
                kv_scales if kv_scales is not None else cos_sin,
                norms.query if norms else cos_sin,
                norms.key if norms else cos_sin,
                cos_sin,
                positions,
                slot_mapping,
            ),
            (heads.stride(0), *kv.stride()[:2]),
            (norms.eps if norms else 0.0,),
            (
                num_heads,
                num_kv_heads,
                head_dim,
                1 << (head_dim - 1).bit_length(),
                cos_sin.shape[1] // 2,
                kv.shape[3],
                _HEADS_PER_PROGRAM,
                norms is not None,
                kv_scales is not None,
            ),
            num_warps=2,
        )
    return out
