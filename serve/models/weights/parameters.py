"""A decoder's parameters between allocation and packing, under the names checkpoints give them.

Matrices stay as the checkpoint stores them until they are packed: loading fills a slot with what
lies in the file. Those that are multiplied with the same input are packed as one (q, k, v; gate,
up).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.stored import Dense, StoredMatrix, dequantize, part_of
from serve.models.spec import DecoderSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_ALL = slice(None)
_LINEAR_NAMES = {
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "head": "lm_head",
}


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of `count` equal parts of every layer: its heads, and its columns of the MLP. What goes
    into a layer, and what comes out of all parts together, is whole."""

    index: int = 0
    count: int = 1

    def of(self, size: int, what: str) -> slice:
        """This part of `size`. Raises ConfigError if it cannot be cut so."""
        if size % self.count:
            raise ConfigError(f"{what} {size} cannot be cut into {self.count} equal parts")
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


@dataclass(slots=True, eq=False)
class MatrixSlot:
    """A place for one matrix [out, in] of a checkpoint, or for some of its rows and columns."""

    whole: tuple[int, int]
    rows: slice
    columns: slice
    dtype: torch.dtype  # what the model is served in
    device: torch.device
    stored: StoredMatrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of what is kept."""
        rows, columns = self.rows.indices(self.whole[0]), self.columns.indices(self.whole[1])
        return len(range(*rows)), len(range(*columns))

    def numel(self) -> int:
        """Weights that are kept."""
        return self.shape[0] * self.shape[1]

    def fill(self, matrix: StoredMatrix) -> None:
        """Keep what belongs here of the whole matrix."""
        is_whole = self.shape == self.whole
        self.stored = matrix if is_whole else part_of(matrix, self.rows, self.columns)

    def take(self, keeps: frozenset[str] = frozenset()) -> StoredMatrix:
        """The matrix as it is stored, if its form is in `keeps` and loses nothing that `dtype` can
        hold; else its values in `dtype`, on the device."""
        assert self.stored is not None, "not loaded"
        if self.dtype is torch.float32 and self.stored.form in keeps:
            return self.stored
        return Dense(self.values())

    def values(self) -> Tensor:
        """[out, in] in `dtype`, on the device."""
        assert self.stored is not None, "not loaded"
        return dequantize(self.stored).to(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class BiasSlot:
    """A place for a bias, or for some of it: `values`, which belong to a longer one."""

    whole: tuple[int]
    rows: slice
    values: Tensor

    def numel(self) -> int:
        """Values that are kept."""
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        """What they are kept in."""
        return self.values.dtype

    def fill(self, stored: StoredMatrix) -> None:
        """Keep what belongs here of the whole bias."""
        self.values.copy_(dequantize(stored)[self.rows])


Target = Tensor | MatrixSlot | BiasSlot
"""Where a checkpoint's tensor goes: matrices are referred to, others copied."""


@dataclass(frozen=True, slots=True)
class LinearParameters:
    """Matrices with one input, stacked along `out`, by name; bias [out] of all of them."""

    parts: dict[str, MatrixSlot]
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        shapes = [slot.shape for slot in self.parts.values()]
        return sum(out for out, _ in shapes), shapes[0][1]

    def by_name(self, prefix: str) -> Iterator[tuple[str, Target]]:
        start = 0
        for name, slot in self.parts.items():
            yield f"{prefix}{name}.weight", slot
            if self.bias is not None:
                values = self.bias[start : start + slot.shape[0]]
                yield f"{prefix}{name}.bias", BiasSlot((slot.whole[0],), slot.rows, values)
            start += slot.shape[0]


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. Norm weights are fp32."""

    qkv: LinearParameters
    output: LinearParameters
    gate_up: LinearParameters
    down: LinearParameters
    norms: dict[str, Tensor]  # by checkpoint name, without ".weight"

    def by_name(self, prefix: str) -> Iterator[tuple[str, Target]]:
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            yield from linear.by_name(prefix)
        for name, weight in self.norms.items():
            yield f"{prefix}{name}.weight", weight


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """Everything a checkpoint must contain. `head` is None when it is the embedding."""

    embedding: MatrixSlot  # [vocab, hidden]
    layers: list[LayerParameters]  # emptied by the model that packs them
    final_norm: Tensor
    head: LinearParameters | None

    def by_name(self) -> dict[str, Target]:
        """Destination of each checkpoint tensor."""
        named: dict[str, Target] = {EMBEDDING: self.embedding, "model.norm.weight": self.final_norm}
        for index, layer in enumerate(self.layers):
            named.update(layer.by_name(f"model.layers.{index}."))
        if self.head is not None:
            named.update(self.head.by_name(""))
        return named


def allocate(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, shard: Shard = Shard()
) -> DecoderParameters:
    """Uninitialized parameters for a spec, or for a part of each of its layers."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    heads = shard.of(spec.num_heads, "num_attention_heads")
    kv_heads = shard.of(spec.num_kv_heads, "num_key_value_heads")
    inner = shard.of(spec.intermediate_size, "intermediate_size")
    query, key = _scaled(heads, spec.head_dim), _scaled(kv_heads, spec.head_dim)
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def slot(out: int, into: int, rows: slice = _ALL, columns: slice = _ALL) -> MatrixSlot:
        return MatrixSlot((out, into), rows, columns, dtype, device)

    def linear(bias: bool, **parts: MatrixSlot) -> LinearParameters:
        named = {_LINEAR_NAMES[name]: part for name, part in parts.items()}
        size = sum(part.shape[0] for part in parts.values())
        return LinearParameters(
            named, torch.empty(size, dtype=dtype, device=device) if bias else None
        )

    def layer() -> LayerParameters:
        return LayerParameters(
            qkv=linear(
                spec.qkv_bias,
                q=slot(query_size, hidden, query),
                k=slot(kv_size, hidden, key),
                v=slot(kv_size, hidden, key),
            ),
            output=linear(spec.output_bias, o=slot(hidden, query_size, _ALL, query)),
            gate_up=linear(
                spec.mlp_bias,
                gate=slot(spec.intermediate_size, hidden, inner),
                up=slot(spec.intermediate_size, hidden, inner),
            ),
            down=linear(spec.mlp_bias, down=slot(hidden, spec.intermediate_size, _ALL, inner)),
            norms={
                name: torch.empty(size, dtype=torch.float32, device=device)
                for name, size in _norm_sizes(spec).items()
            },
        )

    return DecoderParameters(
        embedding=slot(vocab, hidden),
        layers=[layer() for _ in spec.layers],
        final_norm=torch.empty(hidden, dtype=torch.float32, device=device),
        head=None if spec.tie_embeddings else linear(False, head=slot(vocab, hidden)),
    )


def _scaled(units: slice, size: int) -> slice:
    """The same in units `size` times smaller."""
    return slice(units.start * size, units.stop * size)


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
    for target in parameters.by_name().values():
        if isinstance(target, MatrixSlot):
            weight = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            # There: a host needs minutes for eight billion.
            target.stored = Dense(weight.normal_(0.0, 0.02, generator=generator))
        elif isinstance(target, Tensor):
            target.fill_(1.0 - spec.norm_offset)
        else:
            target.values.normal_(0.0, 0.02, generator=generator)
