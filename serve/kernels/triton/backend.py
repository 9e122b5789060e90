"""Paged attention by Triton kernels, as the models see it."""

from __future__ import annotations

from dataclasses import dataclass

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
from serve.kernels.triton.decode_attention import decode_attention
from serve.kernels.triton.decode_plan import DecodePlan, num_decode_rows, plan_decode
from serve.kernels.triton.fp8 import converts_e4m3
from serve.kernels.triton.heads import prepare_heads
from serve.kernels.triton.kv_write import write_kv
from serve.kernels.triton.tiles import Tile, TileTable, multiprocessor_count


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a step's attention is launched: who goes to the decode kernel, and the tiles."""

    decode: DecodePlan | None
    decode_tile: Tile
    ragged_tile: Tile


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
        self._meta: AttentionMetadata | None = None  # of the step that `_plans` are for
        self._plans: dict[tuple[object, ...], _Plan] = {}  # by what layers may differ in

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
        plan = self._plan(arguments, meta)
        decode_rows = 0
        if plan.decode is not None:
            decode_rows = plan.decode.num_rows
            decode_attention(arguments, out, plan.decode, tile=plan.decode_tile)
        if decode_rows < meta.seq_lens.shape[0]:
            ragged_attention(
                arguments,
                out,
                first_row=decode_rows,
                tile=plan.ragged_tile,
                always_mask=self._batch_invariant,
            )
        return out

    def _plan(self, arguments: AttentionArguments, meta: AttentionMetadata) -> _Plan:
        """What this layer has in common with those before it in the same step."""
        a = arguments
        if meta is not self._meta:
            self._meta = meta
            self._plans.clear()
        key = (a.window, a.num_kv_heads, a.group, a.head_dim, a.kv_scales is None, a.query.dtype)
        if key not in self._plans:
            self._plans[key] = self._make_plan(a, meta)
        return self._plans[key]

    def _make_plan(self, arguments: AttentionArguments, meta: AttentionMetadata) -> _Plan:
        a, tile = arguments, self._tile("decode", arguments)
        multiprocessors = multiprocessor_count(a.query.device)
        rows = 0
        if not self._batch_invariant:
            rows = num_decode_rows(meta, a.num_kv_heads, a.window, multiprocessors)
        decode = None
        if rows:
            decode = plan_decode(a, num_rows=rows, tile=tile, multiprocessors=multiprocessors)
        return _Plan(decode, tile, self._tile("ragged", arguments))

    def _tile(self, kernel: str, arguments: AttentionArguments) -> Tile:
        dtype, e4m3 = arguments.query.dtype, arguments.kv_scales is not None
        return self._tiles.attention(kernel, dtype, arguments.head_dim, e4m3=e4m3)

    def _stored(self, kv: Tensor) -> Tensor:
        """The cache as the kernels take it here."""
        return kv.view(torch.uint8) if self._takes_bytes and kv.dtype in E4M3 else kv
