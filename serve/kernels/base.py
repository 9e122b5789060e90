"""What a model asks of a device: the operations, as data and protocols.

Every implementation (reference, triton, cpu) has the same signatures; the plain-torch functions in
`reference.py` define what they compute. Chosen once, in `select.py`, and handed to the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's raggedness: T tokens of R requests, rows with a single token first.

    The `…_host` lists repeat the tensors for code that loops on the CPU.
    """

    query_start_loc: Tensor  # [R+1] int32; row i owns tokens [i]:[i+1] of it
    seq_lens: Tensor  # [R] int32; KV length including this step's tokens
    block_table: Tensor  # [R, max_blocks] int32; null block 0 past a row's length
    slot_mapping: Tensor  # [T] int64; block_id * block_size + offset, where each new K/V is written
    num_decode_rows: int  # leading rows whose query_len is 1
    max_query_len: int
    max_seq_len: int
    query_lens_host: list[int]
    seq_lens_host: list[int]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward pass needs beside token ids; passed down, never global."""

    kv: Sequence[Tensor]  # per layer, shaped by AttentionBackend.kv_shape
    attention: AttentionMetadata
    positions: Tensor  # [T] int64
    prompt_lens: Tensor | None = None
    """[T] int64; prompt length of each token's request. Needed by models whose RoPE frequencies
    depend on the length (dynamic, longrope): `CausalModel.needs_prompt_lens`."""


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What an attention backend can do; None means anything."""

    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None


class AttentionBackend(Protocol):
    """Paged attention over a pool of KV blocks. Dim 0 of the cache is K/V, dim 1 the block; the
    rest is the backend's own, so copy and swap code needs no layouts."""

    name: str
    limits: BackendLimits

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache."""

    def write_kv(self, key: Tensor, value: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at their slots."""

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
    ) -> Tensor:
        """Causal attention of this step's tokens over their requests' blocks.

        query: [T, num_heads, head_dim] → [T, num_heads, head_dim] in query's dtype.
        window w: a token sees itself and the w - 1 before it. softcap c: scores become
        c * tanh(score / c). sinks: [num_heads] fp32, one extra logit per head in the denominator.
        Reads only positions below each row's seq_len.
        """


class RotaryFn(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first `rotary_dim` of each head, pairing x[i] with x[i + rotary_dim/2].

        query [T, num_heads, head_dim], key [T, num_kv_heads, head_dim];
        cos_sin [max_len, rotary_dim] fp32: cos in the first half, sin in the second, attention
        factor folded in. May work in place; use the returned tensors.
        """


class RmsNormFn(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dim, in fp32, returned in x's dtype.

        x: [..., n]. `weight` [n] already holds any offset (Gemma's 1 + w is folded at load).
        """


class AddRmsNormFn(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(x + residual), x + residual)."""


class GatedActFn(Protocol):
    def __call__(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] → [T, n]: activation(first half) * second half; "silu" or "gelu_tanh"."""


PackedLinear = Callable[[Tensor], Tensor]
"""[T, in] → [T, out], in the input's dtype."""


class PackLinearFn(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Lay out weight [out, in] the way this device multiplies fastest. Called once per layer
        after loading; the caller drops its own copy."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer: packed products and norm weights, offsets included."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    before_attention: Tensor
    query_norm: Tensor | None  # of every query head, with key_norm
    key_norm: Tensor | None
    after_attention: Tensor | None  # of attention's output, before it joins the residual
    before_mlp: Tensor
    after_mlp: Tensor | None
    window: int | None
    rope: int  # which of the step's ropes


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """All layers between the embedding and the head."""

    layers: Sequence[LayerParts]
    final_norm: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    eps: float
    scale: float
    softcap: float | None


class DecoderStack(Protocol):
    """A decoder's layers as one call."""

    def __call__(
        self, residual: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], ctx: ForwardContext
    ) -> Tensor:
        """Embeddings [T, hidden], which it may change → [T, hidden], final norm applied. `ropes`
        are (cos_sin, positions) as RotaryFn takes them."""


class FuseDecoderFn(Protocol):
    def __call__(self, decoder: DecoderParts) -> DecoderStack:
        """One call for a whole decoder, with the bits of the single operations."""


class CopyBlocksFn(Protocol):
    def __call__(self, src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
        """dst[:, dst_ids] = src[:, src_ids] for one layer's cache; src and dst may be on different
        devices. Ids are int64 on the CPU. Within one call all reads come before all writes."""


class DrawFn(Protocol):
    def __call__(self, logits: Tensor, controls: Tensor, keys: Tensor) -> Tensor:
        """One token per row [S] int64, after temperature, min_p, top_k and top_p.

        logits [S, vocab] fp32; controls [S, >= 4] fp32: temperature (0: the most likely token),
        top_k, top_p, min_p; keys [S, 2] int32: what the row's noise is made of.
        """


class PenalizeFn(Protocol):
    def __call__(
        self, logits: Tensor, controls: Tensor, generated: Tensor, in_prompt: Tensor
    ) -> None:
        """Penalize logits [S, vocab] fp32 in place. controls [S, 3] fp32: presence, frequency,
        repetition; generated [S, vocab] int32: times generated; in_prompt [S, vocab] bool."""


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """What the sampler does in few passes over the vocabulary, with nothing read on the host."""

    draw: DrawFn
    penalize: PenalizeFn


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's operations."""

    name: str
    attention: AttentionBackend
    rms_norm: RmsNormFn
    add_rms_norm: AddRmsNormFn
    rotary: RotaryFn
    gated_act: GatedActFn
    pack_linear: PackLinearFn
    copy_blocks: CopyBlocksFn
    fuse_decoder: FuseDecoderFn | None = None  # None: the single operations are as fast
    sampling: SamplingKernels | None = None  # None: the sampler's own torch code
