"""The parts of a decoder layer, over packed weights and one device's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serve.kernels.base import ForwardContext, Kernels, PackedLinear
from serve.models.parameters import LayerParameters, LinearParameters
from serve.models.spec import DecoderSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Norm weights of one layer by what they do, offset included."""

    before_attention: Tensor
    after_attention: Tensor | None
    before_mlp: Tensor
    after_mlp: Tensor | None
    query: Tensor | None
    key: Tensor | None

    @classmethod
    def of(cls, norms: dict[str, Tensor], spec: DecoderSpec) -> LayerNorms:
        """In Gemma `post_attention_layernorm` follows attention; elsewhere it precedes the MLP."""
        weights = {name: weight + spec.norm_offset for name, weight in norms.items()}
        post, pre = weights["post_attention_layernorm"], weights.get("pre_feedforward_layernorm")
        return cls(
            before_attention=weights["input_layernorm"],
            after_attention=None if pre is None else post,
            before_mlp=post if pre is None else pre,
            after_mlp=weights.get("post_feedforward_layernorm"),
            query=weights.get("self_attn.q_norm"),
            key=weights.get("self_attn.k_norm"),
        )


def pack(linear: LinearParameters, kernels: Kernels) -> PackedLinear:
    """The matrix product in the device's layout."""
    return kernels.pack_linear(linear.weight, linear.bias)


class Attention:
    """[T, hidden] → [T, hidden]: projections, rotation, cache write, paged attention."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        parameters: LayerParameters,
        norms: LayerNorms,
        kernels: Kernels,
    ) -> None:
        self._qkv = pack(parameters.qkv, kernels)
        self._output = pack(parameters.output, kernels)
        self._query_norm, self._key_norm = norms.query, norms.key
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._qkv_shape = (-1, sum(self._heads), spec.head_dim)
        self._scale = spec.attention_scale
        self._softcap = spec.attention_softcap
        self._window = layer.window
        self._eps = spec.norm_eps
        self._kernels = kernels
        self._backend = kernels.attention

    def forward(
        self, hidden: Tensor, kv: Tensor, rope: tuple[Tensor, Tensor], ctx: ForwardContext
    ) -> Tensor:
        heads = self._qkv(hidden).view(self._qkv_shape)
        query, key, value = heads.split_with_sizes(self._heads, dim=1)
        if self._query_norm is not None and self._key_norm is not None:
            query = self._kernels.rms_norm(query, self._query_norm, self._eps)
            key = self._kernels.rms_norm(key, self._key_norm, self._eps)
        query, key = self._kernels.rotary(query, key, *rope)
        self._backend.write_kv(key, value, kv, ctx.attention.slot_mapping)
        attended = self._backend.attend(
            query, kv, ctx.attention, scale=self._scale, window=self._window, softcap=self._softcap
        )
        return self._output(attended.flatten(1))


class GatedMLP:
    """[T, hidden] → [T, hidden]: down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec, parameters: LayerParameters, kernels: Kernels) -> None:
        self._gate_up = pack(parameters.gate_up, kernels)
        self._down = pack(parameters.down, kernels)
        self._gated_act = kernels.gated_act
        self._activation = spec.activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self._down(self._gated_act(self._gate_up(hidden), self._activation))
