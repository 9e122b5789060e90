"""A .gguf file's settings in the shape of a transformers config, made without transformers: its
classes take seconds to import, and what they add to the settings of these families is little.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from serve.checkpoint.sizes import check_sizes
from serve.errors import ConfigError

_GATED_BY_SILU: Final = {"hidden_act": "silu"}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {**_GATED_BY_SILU, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_GATED_BY_SILU, "sliding_window": 4096},
    "qwen2": _GATED_BY_SILU,
    "qwen3": {**_GATED_BY_SILU, "attention_bias": False},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": 4096,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}
"""What transformers' class of a model type says where the file does not."""
_WITHOUT_WINDOWS: Final = ("qwen2", "qwen3")  # theirs are an option, which no GGUF file sets
_GEMMA_PATTERN: Final = 6  # every sixth layer attends to everything
_NEEDED: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


class GGUFConfig(SimpleNamespace):
    """The settings as attributes, by transformers' names."""

    def get_text_config(self) -> GGUFConfig:
        """Itself: these models are text models."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """All settings."""
        return deepcopy(vars(self))


def make_gguf_config(file: Path, model_type: str, values: Mapping[str, Any]) -> GGUFConfig:
    """The config of the model in `file`. Raises ConfigError."""
    check_sizes(file, values)
    for name in _NEEDED:
        if values.get(name) is None:
            raise ConfigError(f"{file}: it does not say its {name}; download it again")
    for name in ("rms_norm_eps", "sliding_window"):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ConfigError(f"{file}: {name} is {repr(value)[:100]} and must be a number")
    settings = {**_DEFAULTS[model_type], **values, "model_type": model_type}
    num_layers = values["num_hidden_layers"]
    if model_type in _WITHOUT_WINDOWS:
        settings |= {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if model_type == "gemma3_text":
        settings["layer_types"] = [
            "sliding_attention" if (layer + 1) % _GEMMA_PATTERN else "full_attention"
            for layer in range(num_layers)
        ]
    return GGUFConfig(**settings)


def as_transformers_config(config: GGUFConfig) -> Any:
    """The same as an object of transformers' own class."""
    from transformers import AutoConfig  # takes seconds to import

    values = config.to_dict()
    return AutoConfig.for_model(values.pop("model_type"), **values)
