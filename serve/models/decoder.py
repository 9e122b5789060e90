"""The one decoder: every family of `families.py` is this class over another spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.base import DecoderParts, DecoderStack, ForwardContext, Kernels
from serve.kernels.stored import dequantize
from serve.models.base import LayerCache
from serve.models.layers import LayerByLayer, pack, pack_layer
from serve.models.rope import Rope
from serve.models.spec import DecoderSpec, RopeSpec
from serve.models.weights.parameters import DecoderParameters, LinearParameters, MatrixSlot


class DecoderModel:
    """A CausalModel over loaded parameters, which it packs for the device and takes over."""

    is_native = True
    needs_prompt_lens: bool
    can_be_recorded: bool
    prompt_limits: Sequence[tuple[int, bool]]

    def __init__(
        self,
        spec: DecoderSpec,
        parameters: DecoderParameters,
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of activations; the parameters may be in a narrower one."""
        self._dtype = dtype
        self.attention = kernels.attention
        self.vocab_size = spec.vocab_size
        self.max_position = spec.max_position
        self.cache_layers = [LayerCache(spec.num_kv_heads, spec.head_dim) for _ in spec.layers]
        self._spec = spec
        self._embedding = _table(parameters.embedding, kernels)
        self._embedding_scale = _rounded(spec.embedding_scale, dtype)
        head = parameters.head or LinearParameters({"lm_head": parameters.embedding})
        self._head = pack(head, kernels)

        device = parameters.embedding.device
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self._ropes = [Rope(rope, spec.max_position, device) for rope in ropes]
        self.needs_prompt_lens = any(rope.needs_prompt_lens for rope in self._ropes)
        self.can_be_recorded = not self.needs_prompt_lens
        self.prompt_limits = [r.prompt_limit for r in self._ropes if r.prompt_limit is not None]
        decoder = _pack_layers(spec, ropes, parameters, kernels)
        fused = kernels.fuse_decoder(decoder) if kernels.fuse_decoder else None
        self._stack: DecoderStack = fused or LayerByLayer(decoder, kernels)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 → [T or S, hidden], final norm applied."""
        residual = F.embedding(token_ids, self._embedding).to(self._dtype)
        if self._embedding_scale is not None:
            residual = residual * self._embedding_scale
        return self._stack(residual, [rope.for_step(ctx) for rope in self._ropes], ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab] fp32."""
        logits = self._head(hidden).float()
        if (cap := self._spec.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def _pack_layers(
    spec: DecoderSpec, ropes: list[RopeSpec], parameters: DecoderParameters, kernels: Kernels
) -> DecoderParts:
    """Takes the layers over: each is dropped as soon as it is packed, so that a layer's two
    layouts never exist for all layers."""
    layers = []
    for index, layer in enumerate(spec.layers):
        rope = ropes.index(layer.rope)
        layers.append(pack_layer(spec, index, rope, parameters.layers.pop(0), kernels))
    return DecoderParts(
        layers=layers,
        final_norm=parameters.final_norm + spec.norm_offset,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        activation=spec.activation,
        eps=spec.norm_eps,
        scale=spec.attention_scale,
        softcap=spec.attention_softcap,
    )


def _table(embedding: MatrixSlot, kernels: Kernels) -> Tensor:
    """[vocab, hidden], of which rows are looked up: 16 bits stay 16 bits."""
    return dequantize(embedding.take(kernels.keeps & {"float16", "bfloat16"}))


def _rounded(scale: float | None, dtype: torch.dtype) -> float | None:
    """Gemma multiplies by the scale as the activations' dtype can hold it."""
    return None if scale is None else float(torch.tensor(scale).to(dtype))
