"""A decoder's parameters between allocation and packing, under the names checkpoints give them.

Matrices that are multiplied with the same input are one tensor here (q, k, v; gate, up), of which
the checkpoint's tensors are slices: loading is copying into the slice of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.models.spec import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """weight [out, in] and bias [out] of matrices stacked along `out`, named with their sizes."""

    weight: Tensor
    bias: Tensor | None
    parts: tuple[tuple[str, int], ...]

    def by_name(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, size in self.parts:
            rows = slice(start, start + size)
            yield f"{prefix}{name}.weight", self.weight[rows]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[rows]
            start += size


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. Norm weights are fp32."""

    qkv: LinearParameters
    output: LinearParameters
    gate_up: LinearParameters
    down: LinearParameters
    norms: dict[str, Tensor]  # by checkpoint name, without ".weight"

    def by_name(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            yield from linear.by_name(prefix)
        for name, weight in self.norms.items():
            yield f"{prefix}{name}.weight", weight


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """Everything a checkpoint must contain. `head` is None when it is the embedding."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerParameters]  # emptied by the model that packs them
    final_norm: Tensor
    head: LinearParameters | None

    def by_name(self) -> dict[str, Tensor]:
        """Destination of each checkpoint tensor."""
        named = {EMBEDDING: self.embedding, "model.norm.weight": self.final_norm}
        for index, layer in enumerate(self.layers):
            named.update(layer.by_name(f"model.layers.{index}."))
        if self.head is not None:
            named.update(self.head.by_name(""))
        return named


def allocate(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> DecoderParameters:
    """Uninitialized parameters for a spec."""
    hidden, vocab = spec.hidden_size, spec.vocab_size

    def linear(in_size: int, bias: bool, *parts: tuple[str, int]) -> LinearParameters:
        out_size = sum(size for _, size in parts)
        return LinearParameters(
            weight=torch.empty(out_size, in_size, dtype=dtype, device=device),
            bias=torch.empty(out_size, dtype=dtype, device=device) if bias else None,
            parts=parts,
        )

    def layer() -> LayerParameters:
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        inner = spec.intermediate_size
        return LayerParameters(
            qkv=linear(
                hidden,
                spec.qkv_bias,
                ("self_attn.q_proj", query_size),
                ("self_attn.k_proj", kv_size),
                ("self_attn.v_proj", kv_size),
            ),
            output=linear(query_size, spec.output_bias, ("self_attn.o_proj", hidden)),
            gate_up=linear(hidden, spec.mlp_bias, ("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
            down=linear(inner, spec.mlp_bias, ("mlp.down_proj", hidden)),
            norms={
                name: torch.empty(size, dtype=torch.float32, device=device)
                for name, size in _norm_sizes(spec).items()
            },
        )

    return DecoderParameters(
        embedding=torch.empty(vocab, hidden, dtype=dtype, device=device),
        layers=[layer() for _ in spec.layers],
        final_norm=torch.empty(hidden, dtype=torch.float32, device=device),
        head=None if spec.tie_embeddings else linear(hidden, False, ("lm_head", vocab)),
    )


def _norm_sizes(spec: DecoderSpec) -> dict[str, int]:
    """The names are Hugging Face's; `post_attention_layernorm` means two things, see pack_layer."""
    sizes = {"input_layernorm": spec.hidden_size, "post_attention_layernorm": spec.hidden_size}
    if spec.post_norms:
        sizes["pre_feedforward_layernorm"] = spec.hidden_size
        sizes["post_feedforward_layernorm"] = spec.hidden_size
    if spec.qk_norm:
        sizes["self_attn.q_norm"] = spec.head_dim
        sizes["self_attn.k_norm"] = spec.head_dim
    return sizes


def fill_randomly(parameters: DecoderParameters, spec: DecoderSpec, seed: int) -> None:
    """Small random weights and neutral norms, the same for the same seed, spec and device."""
    generator = torch.Generator(parameters.embedding.device).manual_seed(seed)
    for name, target in parameters.by_name().items():
        if name.endswith("norm.weight"):
            target.fill_(1.0 - spec.norm_offset)
        else:
            target.normal_(0.0, 0.02, generator=generator)  # there: a host needs minutes for 8e9
