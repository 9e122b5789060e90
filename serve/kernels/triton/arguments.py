"""What an attention launch gets, checked once: kernels trust shapes, strides and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.base import AttentionMetadata

HEAD_DIMS = tuple(range(16, 257, 8))
BLOCK_SIZES = (8, 16, 32, 64)
E4M3 = (torch.float8_e4m3fn, torch.uint8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """One attention call over T tokens of R requests, in the terms the kernels use."""

    query: Tensor  # [T, num_heads, head_dim]
    kv: Tensor  # [2, num_blocks, num_kv_heads, block_size, head_dim]
    query_start_loc: Tensor  # [R+1] int32
    seq_lens: Tensor  # [R] int32
    block_table: Tensor  # [R, max_blocks] int32
    kv_scales: Tensor | None  # [2, num_kv_heads] fp32, of an e4m3 cache
    sinks: Tensor | None  # [num_heads]
    scale: float
    window: int | None
    softcap: float | None

    def __post_init__(self) -> None:
        query, kv, rows = self.query, self.kv, self.seq_lens.shape[0]
        assert query.dtype in DTYPES, query.dtype
        assert query.ndim == 3, query.shape
        assert query.stride(2) == 1, query.stride()
        check_cache(kv, query.shape[2], self.kv_scales)
        assert self.kv_scales is not None or kv.dtype == query.dtype, (query.dtype, kv.dtype)
        assert query.shape[1] % self.num_kv_heads == 0, (query.shape, kv.shape)
        assert self.query_start_loc.shape == (rows + 1,), self.query_start_loc.shape
        assert self.block_table.shape[:-1] == (rows,), (self.block_table.shape, rows)
        assert self.block_table.stride(1) == 1, self.block_table.stride()
        for index in (self.query_start_loc, self.seq_lens, self.block_table):
            assert index.dtype == torch.int32, index.dtype
        assert self.window is None or self.window > 0, self.window
        assert self.softcap is None or self.softcap > 0, self.softcap
        if self.sinks is not None:
            assert self.sinks.shape == (query.shape[1],), self.sinks.shape
            assert self.sinks.is_contiguous(), self.sinks.stride()

    @classmethod
    def of(
        cls,
        query: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None = None,
    ) -> AttentionArguments:
        """The call described by a step's metadata."""
        return cls(
            query,
            kv,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            kv_scales,
            sinks,
            scale,
            window,
            softcap,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.num_kv_heads

    @property
    def padded_group(self) -> int:
        """`group`, or the next power of two."""
        return 1 << (self.group - 1).bit_length()

    @property
    def padded_dim(self) -> int:
        """`head_dim`, or the next power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def block_size(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.query.shape[2]


def check_cache(kv: Tensor, head_dim: int, kv_scales: Tensor | None) -> None:
    """A layer's cache as `TritonAttention.kv_shape` lays it out; its two halves may lie apart.
    It has scales if it is e4m3, or the bytes of it, and only then."""
    shape, strides = kv.shape, kv.stride()
    assert len(shape) == 5, shape
    assert (shape[0], shape[4]) == (2, head_dim), (shape, head_dim)
    assert head_dim in HEAD_DIMS, f"head_dim {head_dim} is not a multiple of 8 in 16…256"
    assert shape[3] in BLOCK_SIZES, f"block size {shape[3]} is not one of {BLOCK_SIZES}"
    assert strides[3:] == (head_dim, 1), strides
    assert shape[2] == 1 or strides[2] == shape[3] * head_dim, strides
    assert (kv.dtype in E4M3) == (kv_scales is not None), kv.dtype
    if kv_scales is not None:
        assert kv_scales.shape == (2, kv.shape[2]), (kv_scales.shape, kv.shape)
        assert kv_scales.dtype == torch.float32, kv_scales.dtype
        assert kv_scales.is_contiguous(), kv_scales.stride()
