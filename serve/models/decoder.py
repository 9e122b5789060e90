"""The one decoder: every family of `families.py` is this class over another spec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.base import ForwardContext, Kernels
from serve.models.base import LayerCache
from serve.models.layers import Attention, GatedMLP, LayerNorms, pack
from serve.models.parameters import DecoderParameters, LayerParameters, LinearParameters
from serve.models.rope import Rope
from serve.models.spec import DecoderSpec, LayerSpec


class DecoderLayer:
    """Attention and MLP between norms.

    Takes its input already normed, and norms its output with the weight of whatever comes next,
    so that each norm is one fused call with the residual sum before it.
    """

    def __init__(
        self, spec: DecoderSpec, layer: LayerSpec, parameters: LayerParameters, kernels: Kernels
    ) -> None:
        self.norms = LayerNorms.of(parameters.norms, spec)
        self._attention = Attention(spec, layer, parameters, self.norms, kernels)
        self._mlp = GatedMLP(spec, parameters, kernels)
        self._eps = spec.norm_eps
        self._rms_norm = kernels.rms_norm
        self._add_rms_norm = kernels.add_rms_norm

    def forward(
        self,
        normed: Tensor,
        residual: Tensor,
        next_norm: Tensor,
        kv: Tensor,
        rope: tuple[Tensor, Tensor],
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """[T, hidden] twice → (next_norm's output, residual)."""
        norms, eps = self.norms, self._eps
        output = self._attention.forward(normed, kv, rope, ctx)
        if norms.after_attention is not None:
            output = self._rms_norm(output, norms.after_attention, eps)
        normed, residual = self._add_rms_norm(output, residual, norms.before_mlp, eps)
        output = self._mlp.forward(normed)
        if norms.after_mlp is not None:
            output = self._rms_norm(output, norms.after_mlp, eps)
        return self._add_rms_norm(output, residual, next_norm, eps)


class DecoderModel:
    """A CausalModel over loaded parameters, which it packs for the device and takes over."""

    needs_prompt_lens: bool

    def __init__(self, spec: DecoderSpec, parameters: DecoderParameters, kernels: Kernels) -> None:
        self.vocab_size = spec.vocab_size
        self.max_position = spec.max_position
        self.cache_layers = [LayerCache(spec.num_kv_heads, spec.head_dim) for _ in spec.layers]
        self._spec = spec
        self._rms_norm = kernels.rms_norm
        self._embedding = parameters.embedding
        self._embedding_scale = _rounded(spec.embedding_scale, parameters.embedding.dtype)
        head = parameters.head or LinearParameters(parameters.embedding, None, ())
        self._head = pack(head, kernels)

        device = parameters.embedding.device
        ropes = {layer.rope: None for layer in spec.layers}
        self._ropes = [Rope(rope, spec.max_position, device) for rope in ropes]
        self.needs_prompt_lens = any(rope.needs_prompt_lens for rope in self._ropes)
        self._rope_of_layer = [list(ropes).index(layer.rope) for layer in spec.layers]

        self._layers: list[DecoderLayer] = []
        for layer in spec.layers:
            # Taken off the list first, so that a layer's two layouts never exist for all layers.
            self._layers.append(DecoderLayer(spec, layer, parameters.layers.pop(0), kernels))
        self._norms = [layer.norms.before_attention for layer in self._layers]
        self._norms.append(parameters.final_norm + spec.norm_offset)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 → [T, hidden], final norm applied."""
        residual = F.embedding(token_ids, self._embedding)
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        ropes = [rope.for_step(ctx) for rope in self._ropes]
        normed = self._rms_norm(residual, self._norms[0], self._spec.norm_eps)
        for index, layer in enumerate(self._layers):
            rope = ropes[self._rope_of_layer[index]]
            next_norm = self._norms[index + 1]
            normed, residual = layer.forward(normed, residual, next_norm, ctx.kv[index], rope, ctx)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab] fp32."""
        logits = self._head(hidden).float()
        if (cap := self._spec.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """Gemma multiplies by the scale as the embedding's dtype can hold it."""
    return None if scale is None else float(torch.tensor(scale).to(dtype))
