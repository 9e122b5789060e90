"""A decoder as data: everything in which the supported families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A theta that grows with a sequence's length past the original one (NTK-aware)."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Like Llama3Scaling with a ramp over dimensions, and scaled attention (arXiv:2309.00071)."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Searched divisors per frequency, one set up to the original length and one for longer
    sequences, and scaled attention (LongRoPE, arXiv:2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float


RopeScaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of a whole head."""

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. `window` None: attends to everything before."""

    window: int | None
    rope: RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer with RMSNorm, rotary attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int  # longest context, RoPE scaling included
    norm_eps: float
    activation: Activation
    attention_scale: float
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head
    post_norms: bool = False  # RMSNorm of attention's and MLP's output too (Gemma)
    norm_offset: float = 0.0  # norm weights are stored minus this (Gemma: 1)
    embedding_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
