"""Hugging Face configs → DecoderSpec, one short reader per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve.errors import ConfigError
from serve.models.rope import read_rope, scaled_max_position
from serve.models.spec import Activation, DecoderSpec, LayerSpec

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_spec(hf_config: Any, source: Path) -> DecoderSpec | None:
    """The spec of a transformers config object, or None when our decoder does not know the family
    or a variant of it.

    Raises ConfigError, naming `source`, for values no implementation could serve rightly.
    """
    reader = _READERS.get(hf_config.model_type)
    if reader is None or _activation_name(hf_config) not in _ACTIVATIONS:
        return None
    if getattr(hf_config, "use_bidirectional_attention", False):
        return None
    try:
        return reader(hf_config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _llama(config: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return replace(_common(config), qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _mistral(config: Any) -> DecoderSpec:
    return _common(config)


def _qwen2(config: Any) -> DecoderSpec:
    return replace(_common(config), qkv_bias=True)


def _qwen3(config: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return replace(_common(config), qkv_bias=bias, output_bias=bias, qk_norm=True)


def _gemma2(config: Any) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return replace(
        _common(config),
        qkv_bias=bias,
        output_bias=bias,
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logit_softcap=config.final_logit_softcapping,
    )


def _gemma3(config: Any) -> DecoderSpec:
    # Gemma 3's attention ignores attn_logit_softcapping, and its max_position_embeddings already
    # counts the RoPE factor in.
    return replace(
        _gemma2(config),
        qk_norm=True,
        attention_softcap=None,
        max_position=config.max_position_embeddings,
    )


_READERS: Mapping[str, Callable[[Any], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def _common(config: Any) -> DecoderSpec:
    head_dim = config_head_dim(config)
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(config, head_dim),
        max_position=max(
            scaled_max_position(_rope_parameters(config, kind), config.max_position_embeddings)
            for kind in set(_layer_types(config))
        ),
        norm_eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[_activation_name(config)],
        attention_scale=head_dim**-0.5,
        tie_embeddings=bool(config.tie_word_embeddings),
    )


def config_head_dim(config: Any) -> int:
    """Size of one attention head. Raises ConfigError for a model without any."""
    try:
        head_dim = getattr(config, "head_dim", None)
        return int(head_dim or config.hidden_size // config.num_attention_heads)
    except AttributeError as error:
        raise ConfigError(f"it has no attention heads ({error})") from error


def _layers(config: Any, head_dim: int) -> tuple[LayerSpec, ...]:
    by_type = {
        kind: LayerSpec(
            window=_window(config) if kind == "sliding_attention" else None,
            rope=read_rope(
                _rope_parameters(config, kind), head_dim, config.max_position_embeddings
            ),
        )
        for kind in set(_layer_types(config))
    }
    return tuple(by_type[kind] for kind in _layer_types(config))


def _window(config: Any) -> int | None:
    window: int | None = config.sliding_window
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window is {window} and must be positive")
    return window


def _layer_types(config: Any) -> list[str]:
    """Per layer "full_attention" or "sliding_attention"."""
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != config.num_hidden_layers:
        raise ConfigError(
            f"layer_types must name full_attention or sliding_attention for each of "
            f"{config.num_hidden_layers} layers"
        )
    return list(types)


def _rope_parameters(config: Any, layer_type: str) -> Mapping[str, Any]:
    """transformers keeps one section for all layers, or one per layer type."""
    parameters: Mapping[str, Any] = config.rope_parameters
    nested = parameters.get(layer_type)
    return nested if isinstance(nested, Mapping) else parameters


def _activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))
