"""A model's settings as a transformers config object, checked before anything is built from it:
a size of zero would otherwise fail far from the file that says it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve.checkpoint.json_files import read_text
from serve.checkpoint.sizes import check_sizes
from serve.errors import ConfigError


def read_config(folder: Path) -> Any:
    """What a model folder's config.json says. Raises ConfigError."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{file}: the file is missing; {folder} is not a model folder")
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(f"{file}: it has no model_type; use a transformers model's config.json")
    if quantization := content.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ConfigError(
            f"{file}: weights quantized with {method or 'an unknown method'} cannot be served; use "
            "the model's unquantized weights or a .gguf file"
        )
    check_sizes(file, content)
    from transformers import AutoConfig  # takes seconds to import, and .gguf files do without

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers' validators raise every kind
        raise _unusable(file, content["model_type"], error) from error


def _unusable(file: Path, model_type: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:2]) or type(error).__name__
    return ConfigError(f"{file}: model type {model_type!r} cannot be served: {reason}")
