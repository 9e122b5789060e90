"""In what precision the KV cache keeps its numbers, and by which scales.

e4m3 reaches from 2^-9 to 448 with 4 significant bits, so a scale only has to keep the largest keys
and values within 448; one that is too large by a factor costs nothing but range near zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.config import CacheConfig
from serve.kernels.base import AttentionBackend

_E4M3_LARGEST = 448.0
_MARGIN = 2.0  # prompts to come have larger keys than the tokens that are measured
_MANY = 7  # heads, a number that no other dim of the smallest cache has


def cache_dtype(config: CacheConfig, model_dtype: torch.dtype) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model that computes in `model_dtype`."""
    return model_dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def measured_scales(layers: Sequence[Tensor], attention: AttentionBackend) -> list[Tensor]:
    """[2, num_kv_heads] fp32 for each layer, from caches that hold what a model computed."""
    head_dim = attention.kv_shape(1, 1, _MANY, 1).index(_MANY)
    scales = []
    for layer in layers:
        others = [dim for dim in range(1, layer.ndim) if dim != head_dim]
        largest = layer.float().abs().amax(dim=others)
        scale = largest * (_MARGIN / _E4M3_LARGEST)
        scales.append(torch.where(largest > 0, scale, 1.0))
    return scales
