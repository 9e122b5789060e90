"""A whole decoder as one C++ call.

Between single operations a step of few tokens spends more time in Python than in the operations: on
the 135M default model about 2 ms of a step that reads its weights in 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_void_p, pointer

import torch
from torch import Tensor

from serve.kernels.base import (
    DecoderParts,
    DecoderStack,
    ForwardContext,
    GatedParts,
    LayerParts,
    PackedLinear,
)
from serve.kernels.cpu.attention import batch_of
from serve.kernels.cpu.elementwise import ACTIVATIONS
from serve.kernels.cpu.library import Decoder, Layer, Library, Linear, RopeTable, Step, as_rows
from serve.kernels.cpu.linear import CpuLinear


class DecoderFuser:
    """Makes a decoder's layers one call; a `FuseDecoderFn`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, decoder: DecoderParts) -> DecoderStack | None:
        mlps = [layer.mlp for layer in decoder.layers]
        if not all(isinstance(mlp, GatedParts) for mlp in mlps):
            return None
        return FusedDecoder(self._library, decoder)


class FusedDecoder:
    """Keeps the parts alive that the C++ structures point to."""

    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._parts = parts
        self._norms: list[Tensor] = []
        self._cache: Sequence[Tensor] = ()
        self._starts = _starts(())  # of the cache that the last step used
        layers = (Layer * len(parts.layers))(*map(self._layer, parts.layers))
        down = layers[0].down
        self._decoder = Decoder(
            *(layers, self._norm(parts.final_norm), len(parts.layers)),
            *(down.out_size, down.in_size, parts.num_heads, parts.num_kv_heads, parts.head_dim),
            *(ACTIVATIONS[parts.activation], parts.eps, parts.scale, parts.softcap or 0.0),
        )

    def __call__(
        self, residual: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], ctx: ForwardContext
    ) -> Tensor:
        residual = as_rows(residual)
        meta, wanted = ctx.attention, ctx.logits_indices
        assert meta.slot_mapping.dtype is torch.int64
        assert wanted is None or wanted.dtype is torch.int64
        num_wanted = len(residual) if wanted is None else len(wanted)
        out = residual.new_empty(num_wanted, residual.shape[1])
        if ctx.kv is not self._cache:
            self._cache, self._starts = ctx.kv, _starts(ctx.kv)
        step = Step(
            *(pointer(batch_of(meta)), meta.slot_mapping.data_ptr()),
            *self._starts,
            *((RopeTable * len(ropes))(*map(_rope, ropes)), ctx.kv[0].shape[3]),
            *(residual.shape[0], residual.data_ptr()),
            *(None if wanted is None else wanted.data_ptr(), num_wanted, out.data_ptr()),
        )
        self._library.decode(self._library.pool, byref(self._decoder), byref(step))
        return out

    def _layer(self, parts: LayerParts) -> Layer:
        assert isinstance(parts.mlp, GatedParts), "DecoderFuser declines other kinds"
        return Layer(
            *map(_described, (parts.qkv, parts.output, parts.mlp.gate_up, parts.mlp.down)),
            *(self._norm(parts.before_attention), self._norm(parts.query_norm)),
            *(self._norm(parts.key_norm), self._norm(parts.after_attention)),
            *(self._norm(parts.before_mlp), self._norm(parts.after_mlp)),
            *(parts.window or 0, parts.rope),
        )

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._norms.append(as_rows(weight))
        return self._norms[-1].data_ptr()


def _starts(kv: Sequence[Tensor]) -> tuple[Array[c_void_p], Array[c_void_p]]:
    """Where each layer's keys and values begin."""
    keys = [layer.data_ptr() for layer in kv]
    values = [start + layer.nbytes // 2 for start, layer in zip(keys, kv, strict=True)]
    return (c_void_p * len(kv))(*keys), (c_void_p * len(kv))(*values)


def _described(linear: PackedLinear) -> Linear:
    assert isinstance(linear, CpuLinear), "packed by other kernels"
    return linear.described()


def _rope(rope: tuple[Tensor, Tensor]) -> RopeTable:
    cos_sin, positions = rope
    assert cos_sin.dtype is torch.float32
    assert positions.dtype is torch.int64
    assert cos_sin.is_contiguous()
    assert positions.is_contiguous()
    return RopeTable(cos_sin.data_ptr(), positions.data_ptr(), cos_sin.shape[1])
