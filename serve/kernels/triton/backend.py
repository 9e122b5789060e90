"""Paged attention by Triton kernels, as the models see it."""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.base import AttentionMetadata, BackendLimits, HeadNorms
from serve.kernels.triton.arguments import (
    BLOCK_SIZES,
    DTYPES,
    E4M3,
    HEAD_DIMS,
    AttentionArguments,
)
from serve.kernels.triton.attention import ragged_attention
from serve.kernels.triton.decode_attention import decode_attention, plan_splits
from serve.kernels.triton.fp8 import converts_e4m3
from serve.kernels.triton.heads import prepare_heads
from serve.kernels.triton.kv_write import write_kv
from serve.kernels.triton.tiles import Tile, TileTable, multiprocessor_count


class TritonAttention:
    """An AttentionBackend. One head of one block is one contiguous piece of the cache."""

    name = "triton"
    limits = BackendLimits(
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES),
        head_dims=HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        cache_dtypes=("float8_e4m3fn",),
    )

    def __init__(self, tiles: TileTable, *, batch_invariant: bool = False) -> None:
        """batch_invariant: a token's result must not depend, bit for bit, on what shares its step
        or on how its prompt was cut; so one kernel, one tile, no split."""
        self._tiles = tiles
        self._batch_invariant = batch_invariant
        self._takes_bytes = not converts_e4m3(tiles.target)

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[2, num_blocks, num_kv_heads, block_size, head_dim]."""
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at their slots."""
        write_kv(key, value, self._stored(kv), slot_mapping, kv_scales)

    def prepare_heads(
        self,
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Head norms, rotation and cache write in one launch; see PrepareHeadsFn."""
        kv = self._stored(kv)
        return prepare_heads(heads, num_heads, norms, rope, kv, slot_mapping, kv_scales)

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
        """Causal attention of this step's tokens over their requests' blocks."""
        arguments = AttentionArguments.of(
            query,
            self._stored(kv),
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_scales=kv_scales,
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not query.shape[0]:
            return out
        num_rows = meta.seq_lens.shape[0]
        split_rows, num_splits = 0, 1
        if not self._batch_invariant:
            split_rows, num_splits = plan_splits(
                meta, arguments.num_kv_heads, window, multiprocessor_count(query.device)
            )
        if split_rows:
            tile = self._tile("decode", arguments)
            decode_attention(arguments, out, num_rows=split_rows, num_splits=num_splits, tile=tile)
        if split_rows < num_rows:
            tile = self._tile("ragged", arguments)
            ragged_attention(
                arguments,
                out,
                first_row=split_rows,
                tile=tile,
                always_mask=self._batch_invariant,
            )
        return out

    def _tile(self, kernel: str, arguments: AttentionArguments) -> Tile:
        dtype, e4m3 = arguments.query.dtype, arguments.kv_scales is not None
        return self._tiles.attention(kernel, dtype, arguments.head_dim, e4m3=e4m3)

    def _stored(self, kv: Tensor) -> Tensor:
        """The cache as the kernels take it here."""
        return kv.view(torch.uint8) if self._takes_bytes and kv.dtype in E4M3 else kv
