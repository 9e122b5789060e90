"""Paged attention on the CPU, straight over the block table."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from serve.kernels.base import AttentionMetadata, BackendLimits
from serve.kernels.cpu.library import Attention, Batch, Cache, Library


class CpuAttention:
    """Ragged prefill and decode in one call.

    Cache layout: keys [num_blocks, num_kv_heads, head_dim, block_size] and values
    [num_blocks, num_kv_heads, block_size, head_dim], as `kv[0]` and `kv[1]` of one tensor whose
    declared shape is that of the values.
    """

    name = "cpu"
    limits = BackendLimits(dtypes=("float32",), head_dims=tuple(range(16, 513, 16)))

    def __init__(self, library: Library) -> None:
        self._library = library

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> None:
        assert kv_scales is None, "not among the cache dtypes of `limits`"
        key, value = _heads_side_by_side(key), _heads_side_by_side(value)
        assert slot_mapping.dtype is torch.int64
        assert slot_mapping.is_contiguous()
        self._library.write_kv(
            *(self._library.pool, byref(_cache(kv)), key.data_ptr(), value.data_ptr()),
            *(key.stride(0), value.stride(0), slot_mapping.data_ptr(), key.shape[0]),
        )

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        assert kv_scales is None, "not among the cache dtypes of `limits`"
        query = _heads_side_by_side(query)
        num_heads = query.shape[1]
        if sinks is not None:
            sinks = sinks.float().contiguous()
        attention = Attention(
            num_heads,
            window or 0,
            scale,
            softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        out = torch.empty(query.shape)
        self._library.attend(
            *(self._library.pool, byref(_cache(kv)), byref(batch_of(meta)), byref(attention)),
            *(query.data_ptr(), query.stride(0), out.data_ptr()),
        )
        return out


def _heads_side_by_side(x: Tensor) -> Tensor:
    """[T, heads, head_dim] fp32; tokens may be any distance apart, as in a slice of fused qkv."""
    assert x.dtype is torch.float32, f"the cpu kernels compute in float32, not {x.dtype}"
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        return x.contiguous()
    return x


def _cache(kv: Tensor) -> Cache:
    assert kv.dtype is torch.float32
    assert kv.is_contiguous()
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    start = kv.data_ptr()
    return Cache(start, start + kv.nbytes // 2, num_kv_heads, head_dim, block_size)


def batch_of(meta: AttentionMetadata) -> Batch:
    """The step's raggedness as the C++ code takes it; `meta` must outlive it."""
    table = meta.block_table
    for tensor in (meta.query_start_loc, meta.seq_lens, table):
        assert tensor.dtype is torch.int32
        assert tensor.stride(-1) == 1
    return Batch(
        *(meta.query_start_loc.data_ptr(), meta.seq_lens.data_ptr(), table.data_ptr()),
        *(table.stride(0), meta.seq_lens.shape[0]),
    )
