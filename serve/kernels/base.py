"""What a model asks of a device: the operations, as data and protocols.

Every implementation (reference, triton, cpu) has the same signatures; the plain-torch functions in
`reference.py` define what they compute. Chosen once, in `select.py`, and handed to the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serve.kernels.sampling import SamplingKernels
from serve.kernels.stored import StoredMatrix


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
    kv_scales: Sequence[Tensor] | None = None
    """Per layer [2, num_kv_heads] fp32, for an e4m3 cache: what its keys and values are times."""
    logits_indices: Tensor | None = None
    """[S] int64, ascending: the tokens whose hidden states are asked for; None means all. Of the
    others a model needs keys and values only, so its last layer may leave out the rest."""

    def scales_of(self, layer: int) -> Tensor | None:
        """The scales of one layer's cache, if it has any."""
        return None if self.kv_scales is None else self.kv_scales[layer]


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """What an attention backend can do; None means anything."""

    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    cache_dtypes: tuple[str, ...] = ()  # of the cache, beside the dtype that is computed in


class AttentionBackend(Protocol):
    """Paged attention over a pool of KV blocks. Dim 0 of the cache is K/V, dim 1 the block; the
    rest is the backend's own, so copy and swap code needs no layouts."""

    name: str
    limits: BackendLimits

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> None:
        """Store key and value [T, num_kv_heads, head_dim] at their slots.

        kv_scales [2, num_kv_heads] fp32 (of keys, of values) belong to an e4m3 cache: it holds
        key / scale, bounded by ±448 and rounded to nearest.
        """

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
        """Causal attention of this step's tokens over their requests' blocks.

        query: [T, num_heads, head_dim] → [T, num_heads, head_dim] in query's dtype.
        window w: a token sees itself and the w - 1 before it. softcap c: scores become
        c * tanh(score / c). sinks: [num_heads] fp32, one extra logit per head in the denominator.
        kv_scales: as the cache was written. Reads only positions below each row's seq_len.
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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of every query head and every key head, offsets included."""

    query: Tensor  # [head_dim]
    key: Tensor
    eps: float


class PrepareHeadsFn(Protocol):
    def __call__(
        self,
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """From one projection to attention: head norms, rotation, cache write.

        heads [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values, which it may
        change. rope: (cos_sin, positions) as RotaryFn takes them; kv, slot_mapping and kv_scales
        as AttentionBackend.write_kv does. Returns the queries [T, num_heads, head_dim].
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
    def __call__(self, parts: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
        """Lay out matrices [out, in], stacked along `out`, the way this device multiplies fastest.

        They are in one dtype and on this device, or in forms that `Kernels.keeps` names. Called
        once per layer after loading; the caller drops its own copies."""


@dataclass(frozen=True, slots=True)
class GatedParts:
    """down(activation(first half) * second half) of what `gate_up` gives."""

    gate_up: PackedLinear
    down: PackedLinear


MlpParts = GatedParts | Callable[[Tensor], Tensor]
"""A layer's MLP; one of another kind computes itself, [T, hidden] → [T, hidden]."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer: packed products and norm weights, offsets included."""

    qkv: PackedLinear
    output: PackedLinear
    mlp: MlpParts
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
    def __call__(self, decoder: DecoderParts) -> DecoderStack | None:
        """One call for a whole decoder, with the bits of the single operations. None if there is
        a layer in it that the call does not know."""


class CopyBlocksFn(Protocol):
    def __call__(self, src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
        """dst[:, dst_ids] = src[:, src_ids]; src and dst may be on different devices.

        src and dst [2 * layers, blocks, …]: keys and values of all layers. Ids are int64 on the
        CPU. Within one call all reads come before all writes.
        """


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
    prepare_heads: PrepareHeadsFn | None = None  # None: the single operations are as fast
    fuse_decoder: FuseDecoderFn | None = None  # None: the single operations are as fast
    sampling: SamplingKernels | None = None  # None: the sampler's own torch code
    is_thread_invariant: bool = False  # a product's bits do not depend on torch's number of threads
    keeps: frozenset[str] = frozenset()
    """Forms of stored matrices, by `StoredMatrix.form`, that are multiplied as if they were in
    fp32, without being widened first."""
    build: str = ""  # what decides their bits beside torch, the device and this package's version
    compiling: Callable[[], AbstractContextManager[None]] | None = None
    """Of kernels that are compiled at their first call, which had better come before any request:
    what tells a user how far that is. None: there is nothing to compile."""
