"""What the worker needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serve.kernels.base import AttentionBackend, ForwardContext


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV shape of one attention layer."""

    num_kv_heads: int
    head_dim: int


class CausalModel(Protocol):
    """A decoder over ragged steps. It knows neither requests nor blocks."""

    vocab_size: int
    max_position: int  # longest context the checkpoint claims, RoPE scaling included
    cache_layers: list[LayerCache]  # one per entry of ForwardContext.kv
    attention: AttentionBackend  # whose layout the caches have
    is_native: bool  # our decoder: it computes by the kernels it was given, and by nothing else
    needs_prompt_lens: bool  # ForwardContext.prompt_lens must be given
    can_be_recorded: bool
    """Nothing is computed on the host which a graph would keep from the step it was recorded in."""
    prompt_limits: Sequence[tuple[int, bool]]
    """Prompt lengths above which keys are others than up to it, and whether for each length its
    own: the KV of two prompts on different sides of one is never the same."""

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 → [T, hidden], or [S, hidden] of ctx.logits_indices; writes this step's K/V
        into ctx.kv."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab] fp32."""
