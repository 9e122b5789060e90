"""Rotary embeddings: what a config says about them, and the tables the kernels read.

The frequency formulas are those of the papers named in `spec.py`, evaluated in fp32 in the order
transformers evaluates them, because at a position of some ten thousand the last bit of a frequency
shows in the angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.base import ForwardContext
from serve.models.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Rope:
    """One kind of rotary embedding, ready for steps up to `max_position` tokens of context.

    `max_position` bounds the tables: [max_position, head_dim] fp32, twice that for LongScaling.
    """

    def __init__(self, spec: RopeSpec, max_position: int, device: torch.device) -> None:
        self._spec = spec
        self._max_position = max_position
        self.prompt_limit = _prompt_limit(spec.scaling)
        self.needs_prompt_lens = self.prompt_limit is not None
        table_len = 0 if isinstance(spec.scaling, DynamicScaling) else max_position
        self._table = _table(spec, table_len).to(device)

    def for_step(self, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """(cos_sin, positions) for this step's tokens, as the rotary kernel takes them."""
        scaling = self._spec.scaling
        if isinstance(scaling, LongScaling):
            is_long = _rotation_lens(ctx) > scaling.original_max_position
            return self._table, ctx.positions + is_long * self._max_position
        if isinstance(scaling, DynamicScaling):
            rows = _dynamic_rows(self._spec, scaling, ctx)
            return rows, torch.arange(len(rows), device=rows.device)
        return self._table, ctx.positions


def table_peak_bytes(spec: RopeSpec, max_position: int) -> int:
    """Memory that making a Rope takes: its table, with the angles, cosines and sines of it."""
    if isinstance(spec.scaling, DynamicScaling):
        return 0
    halves = 7 if isinstance(spec.scaling, LongScaling) else 5
    return halves * max_position * (spec.head_dim // 2) * torch.float32.itemsize


def _prompt_limit(scaling: RopeScaling | None) -> tuple[int, bool] | None:
    """Up to which length of a prompt its angles are the same, and whether each greater length has
    its own; None when they do not depend on it. See `_rotation_lens`."""
    if isinstance(scaling, DynamicScaling | LongScaling):
        return scaling.original_max_position, isinstance(scaling, DynamicScaling)
    return None


def _dynamic_rows(spec: RopeSpec, scaling: DynamicScaling, ctx: ForwardContext) -> Tensor:
    """cos_sin [T, head_dim] for this step's tokens: every length has its own frequencies."""
    dim, original = spec.head_dim, scaling.original_max_position
    lens = _rotation_lens(ctx).clamp(min=original)
    growth = scaling.factor * lens / original - (scaling.factor - 1)
    theta = spec.theta * growth ** (dim / (dim - 2))
    frequencies = 1.0 / theta[:, None] ** _exponents(dim).to(theta.device)
    angles = ctx.positions[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _rotation_lens(ctx: ForwardContext) -> Tensor:
    """[T]: the sequence length that decides each token's frequencies.

    It is the prompt's length for its tokens and the length so far for generated ones: what
    transformers uses when it prefills a prompt at once and then decodes.
    """
    assert ctx.prompt_lens is not None, "this model's RoPE needs ForwardContext.prompt_lens"
    return torch.maximum(ctx.prompt_lens, ctx.positions + 1)


def _table(spec: RopeSpec, max_position: int) -> Tensor:
    """cos_sin as the rotary kernel wants it; LongScaling's long half follows its short one."""
    scaling, plain = spec.scaling, 1.0 / spec.theta ** _exponents(spec.head_dim)
    if scaling is None or isinstance(scaling, DynamicScaling):
        return _cos_sin(plain, max_position)
    if isinstance(scaling, LinearScaling):
        return _cos_sin(plain / scaling.factor, max_position)
    if isinstance(scaling, Llama3Scaling):
        return _cos_sin(llama3_frequencies(plain, scaling), max_position)
    if isinstance(scaling, YarnScaling):
        table = _cos_sin(_yarn_frequencies(spec, scaling), max_position)
        return table * scaling.attention_factor
    powers = spec.theta ** _exponents(spec.head_dim)
    tables = [
        _cos_sin(1.0 / (torch.tensor(factors) * powers), max_position)
        for factors in (scaling.short_factors, scaling.long_factors)
    ]
    return torch.cat(tables) * scaling.attention_factor


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2).float() / head_dim


def _cos_sin(frequencies: Tensor, max_position: int) -> Tensor:
    angles = torch.arange(max_position).float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def llama3_frequencies(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's frequencies from the unscaled ones [head_dim / 2]."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    kept = (scaling.original_max_position / wavelengths - low) / (high - low)
    blend = (1 - kept) * plain / scaling.factor + kept * plain
    frequencies = torch.where(kept < 0, plain / scaling.factor, blend)
    return torch.where(kept > 1, plain, frequencies)


def _yarn_frequencies(spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    powers = spec.theta ** _exponents(spec.head_dim)
    low = _dim_that_turns(scaling.beta_fast, spec, scaling)
    high = _dim_that_turns(scaling.beta_slow, spec, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(spec.head_dim // 2).float() - low) / width).clamp(0, 1)
    kept = 1 - interpolated
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _dim_that_turns(turns: float, spec: RopeSpec, scaling: YarnScaling) -> float:
    """The (fractional) dimension whose angle makes `turns` turns over the original context."""
    wavelength = scaling.original_max_position / (turns * 2 * math.pi)
    return spec.head_dim * math.log(wavelength) / (2 * math.log(spec.theta))


def read_rope(parameters: Mapping[str, Any], head_dim: int, max_position: int) -> RopeSpec:
    """A config's RoPE section (new `rope_parameters` or old `rope_scaling` keys) as a spec.

    `max_position` is the config's max_position_embeddings. Raises ConfigError for kinds and values
    that cannot be served.
    """
    kind = _kind(parameters)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported for this model type")
    try:
        scaling = _read_scaling(kind, parameters, max_position)
        spec = RopeSpec(head_dim, _theta(parameters), scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is wrong: {error}"
        raise ConfigError(f"rope_parameters of kind {kind!r} {what}") from error
    if isinstance(scaling, LongScaling):
        for factors in (scaling.short_factors, scaling.long_factors):
            if len(factors) != head_dim // 2:
                raise ConfigError(
                    f"longrope needs {head_dim // 2} factors for head size "
                    f"{head_dim}, not {len(factors)}"
                )
    return spec


def _kind(parameters: Mapping[str, Any]) -> str:
    """The old key is `type`, the new one `rope_type`; a mere default must not hide the other."""
    kinds = [parameters.get("rope_type"), parameters.get("type")]
    named = [kind for kind in kinds if kind not in (None, "default")]
    kind = str(named[0]) if named else "default"
    if kind not in KINDS:
        raise ConfigError(f"RoPE kind {kind!r} is not supported; supported are {', '.join(KINDS)}")
    return kind


def _read_scaling(
    kind: str, parameters: Mapping[str, Any], max_position: int
) -> RopeScaling | None:
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_factor(parameters))
    if kind == "dynamic":
        return DynamicScaling(_factor(parameters), max_position)
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        return Llama3Scaling(_factor(parameters), float(low), float(high), original)
    if kind == "yarn":
        return _read_yarn(parameters, original, max_position)
    return _read_longrope(parameters, original, max_position)


def _theta(parameters: Mapping[str, Any]) -> float:
    theta = float(parameters["rope_theta"])
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be a positive number, not {theta}")
    return theta


def _factor(parameters: Mapping[str, Any]) -> float:
    factor = float(parameters["factor"])
    if not 1.0 <= factor < math.inf:
        raise ValueError(f"factor must be at least 1 and finite, not {factor}")
    return factor


def _read_yarn(parameters: Mapping[str, Any], original: int, max_position: int) -> YarnScaling:
    has_factor = parameters.get("factor") is not None
    factor = _factor(parameters) if has_factor else max_position / original
    attention = parameters.get("attention_factor")
    if attention is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            attention = _yarn_attention(factor, mscale) / _yarn_attention(factor, mscale_all)
        else:
            attention = _yarn_attention(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=float(attention),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
    )


def _yarn_attention(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(parameters: Mapping[str, Any], original: int, max_position: int) -> LongScaling:
    has_factor = parameters.get("factor") is not None
    factor = _factor(parameters) if has_factor else max_position / original
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongScaling(
        short_factors=tuple(float(f) for f in parameters["short_factor"]),
        long_factors=tuple(float(f) for f in parameters["long_factor"]),
        original_max_position=original,
        attention_factor=float(attention),
    )


def scaled_max_position(parameters: Mapping[str, Any], max_position: int) -> int:
    """The context a config claims: its max_position_embeddings with the RoPE factor applied.

    linear and dynamic configs state the original length there, yarn ones either; llama3 and
    longrope ones state the scaled length, unless it equals the original.
    """
    kind = _kind(parameters)
    factor = float(parameters.get("factor") or 1.0)
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    if kind in ("linear", "dynamic"):
        return int(max_position * factor)
    if kind == "yarn":
        return max(max_position, int(original * factor))
    if kind in ("llama3", "longrope") and max_position <= original:
        return int(original * factor)
    return max_position
