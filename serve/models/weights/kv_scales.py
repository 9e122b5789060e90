"""Scales of an eight-bit KV cache that a checkpoint brings along, beside its weights."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.models.weights import safetensors_files
from serve.models.weights.checkpoint import Checkpoint

_PLACES = r"(?:attn\.|[kv]_proj\.|qkv_proj\.)?"  # beside attention, or what makes its inputs
_NAME = re.compile(rf"\.layers\.(?P<layer>\d+)\.self_attn\.{_PLACES}(?P<half>[kv])_scale$")


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is such a scale, which a cache in full precision ignores."""
    return _NAME.search(name) is not None


def read_kv_scales(checkpoint: Checkpoint, num_kv_heads: Sequence[int]) -> list[Tensor] | None:
    """[2, num_kv_heads] fp32 for each layer, of keys and of values; None if the checkpoint has
    none. A stored scale is one number, or one per head.

    Raises ConfigError for another shape, and for layers without scales among others with them.
    """
    if checkpoint.format != "safetensors":
        return None
    scales = [torch.full((2, heads), torch.nan) for heads in num_kv_heads]
    found = False
    for name, tensor in safetensors_files.read_matching(checkpoint.files, is_kv_scale):
        match = _NAME.search(name)
        assert match, name
        layer = int(match["layer"])
        if layer >= len(scales) or tensor.numel() not in (1, num_kv_heads[layer]):
            raise ConfigError(
                f"{checkpoint.path}: {name} has shape {list(tensor.shape)}, which does not fit the "
                f"config's {len(scales)} layers and their KV heads; use --kv-cache-dtype auto"
            )
        scales[layer]["kv".index(match["half"])] = tensor.float().flatten()
        found = True
    if found and not all(bool((scale > 0).all()) for scale in scales):
        raise ConfigError(
            f"{checkpoint.path}: some layers lack a positive k_scale or v_scale; "
            "use --kv-cache-dtype auto"
        )
    return scales if found else None
