"""The parts of a decoder layer, over packed weights and one device's kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serve.kernels.base import (
    DecoderParts,
    ForwardContext,
    GatedParts,
    HeadNorms,
    Kernels,
    LayerParts,
    PackedLinear,
)
from serve.kernels.reference import prepare_heads_by_parts
from serve.models.spec import DecoderSpec
from serve.models.weights.parameters import LayerParameters, LinearParameters


def pack(linear: LinearParameters, kernels: Kernels) -> PackedLinear:
    """The matrix product in the device's layout."""
    parts = [slot.take(kernels.keeps) for slot in linear.parts.values()]
    return kernels.pack_linear(parts, linear.bias)


def pack_layer(
    spec: DecoderSpec, index: int, rope: int, parameters: LayerParameters, kernels: Kernels
) -> LayerParts:
    """Layer `index` as the kernels take it; `rope` is its place among the step's ropes.

    In Gemma `post_attention_layernorm` follows attention; elsewhere it precedes the MLP.
    """
    norms = {name: weight + spec.norm_offset for name, weight in parameters.norms.items()}
    post, pre = norms["post_attention_layernorm"], norms.get("pre_feedforward_layernorm")
    return LayerParts(
        qkv=pack(parameters.qkv, kernels),
        output=pack(parameters.output, kernels),
        mlp=GatedParts(pack(parameters.gate_up, kernels), pack(parameters.down, kernels)),
        before_attention=norms["input_layernorm"],
        query_norm=norms.get("self_attn.q_norm"),
        key_norm=norms.get("self_attn.k_norm"),
        after_attention=None if pre is None else post,
        before_mlp=post if pre is None else pre,
        after_mlp=norms.get("post_feedforward_layernorm"),
        window=spec.layers[index].window,
        rope=rope,
    )


class DecoderLayer:
    """Attention and MLP between norms.

    Takes its input already normed, and norms its output with the weight of whatever comes next,
    so that each norm is one fused call with the residual sum before it.
    """

    def __init__(
        self, decoder: DecoderParts, index: int, next_norm: Tensor, kernels: Kernels
    ) -> None:
        parts = decoder.layers[index]
        self._attention = Attention(decoder, index, parts, kernels)
        mlp = parts.mlp
        if isinstance(mlp, GatedParts):
            mlp = GatedMLP(mlp, decoder.activation, kernels).forward
        self._mlp = mlp
        self._parts = parts
        self._next_norm = next_norm
        self._eps = decoder.eps
        self._rms_norm = kernels.rms_norm
        self._add_rms_norm = kernels.add_rms_norm

    def forward(
        self,
        normed: Tensor,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden] twice → (the next norm's output, residual)."""
        parts, eps = self._parts, self._eps
        output = self._attention.forward(normed, rope, ctx)
        if parts.after_attention is not None:
            output = self._rms_norm(output, parts.after_attention, eps)
        normed, residual = self._add_rms_norm(output, residual, parts.before_mlp, eps)
        output = self._mlp(normed)
        if parts.after_mlp is not None:
            output = self._rms_norm(output, parts.after_mlp, eps)
        return self._add_rms_norm(output, residual, self._next_norm, eps)


class Attention:
    """[T, hidden] → [T, hidden]: projections, rotation, cache write, paged attention."""

    def __init__(
        self, decoder: DecoderParts, index: int, parts: LayerParts, kernels: Kernels
    ) -> None:
        self._qkv, self._output = parts.qkv, parts.output
        self._num_heads = decoder.num_heads
        self._heads_shape = (-1, decoder.num_heads + 2 * decoder.num_kv_heads, decoder.head_dim)
        self._norms = None
        if parts.query_norm is not None and parts.key_norm is not None:
            self._norms = HeadNorms(parts.query_norm, parts.key_norm, decoder.eps)
        self._scale = decoder.scale
        self._softcap = decoder.softcap
        self._window = parts.window
        self._index = index
        self._attend = kernels.attention.attend
        self._prepare_heads = kernels.prepare_heads or prepare_heads_by_parts(
            kernels.rms_norm, kernels.rotary, kernels.attention
        )

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], ctx: ForwardContext) -> Tensor:
        heads = self._qkv(hidden).view(self._heads_shape)
        kv, kv_scales = ctx.kv[self._index], ctx.scales_of(self._index)
        slots = ctx.attention.slot_mapping
        query = self._prepare_heads(heads, self._num_heads, self._norms, rope, kv, slots, kv_scales)
        attended = self._attend(
            query,
            kv,
            ctx.attention,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            kv_scales=kv_scales,
        )
        return self._output(attended.flatten(1))


class GatedMLP:
    """[T, hidden] → [T, hidden]: down(activation(gate(x)) * up(x))."""

    def __init__(self, parts: GatedParts, activation: str, kernels: Kernels) -> None:
        self._gate_up, self._down = parts.gate_up, parts.down
        self._gated_act = kernels.gated_act
        self._activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self._down(self._gated_act(self._gate_up(hidden), self._activation))


class LayerByLayer:
    """A decoder's layers, operation by operation; a `DecoderStack`."""

    def __init__(self, decoder: DecoderParts, kernels: Kernels) -> None:
        self._first_norm = decoder.layers[0].before_attention
        self._ropes = [parts.rope for parts in decoder.layers]
        self._eps = decoder.eps
        self._rms_norm = kernels.rms_norm
        norms = [parts.before_attention for parts in decoder.layers[1:]] + [decoder.final_norm]
        self._layers = [
            DecoderLayer(decoder, index, next_norm, kernels)
            for index, next_norm in enumerate(norms)
        ]

    def __call__(
        self, residual: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], ctx: ForwardContext
    ) -> Tensor:
        normed = self._rms_norm(residual, self._first_norm, self._eps)
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            normed, residual = layer.forward(normed, residual, ropes[rope], ctx)
        return normed if ctx.logits_indices is None else normed[ctx.logits_indices]
