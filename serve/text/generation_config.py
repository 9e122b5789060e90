"""What a checkpoint says about ending, and the sampling its makers wish for.

Defaults come from `generation_config.json`; a field that a request gives always wins over them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from serve.checkpoint.find import find_gguf
from serve.checkpoint.json_files import read_json_object
from serve.errors import ConfigError, InvalidRequest
from serve.sampling_params import SamplingParams
from serve.text.gguf_tokenizer import read_gguf_end_ids

logger = logging.getLogger(__name__)

DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json that become sampling defaults, spelled as in SamplingParams."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a checkpoint says about ending and sampling."""

    eos_token_ids: frozenset[int] = frozenset()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)


def read_generation_config(model_path: Path, mode: Literal["auto", "none"]) -> GenerationConfig:
    """End ids and sampling defaults of the model at `model_path`; "none" leaves out the defaults.

    End ids are facts about the model, so they are read in both modes: generation_config.json's
    (an id or a list), else config.json's; or what a .gguf file's tokenizer names as ends.
    Raises ConfigError for unreadable JSON or values out of range.
    """
    gguf_file = find_gguf(model_path)
    if gguf_file is not None:
        return GenerationConfig(read_gguf_end_ids(gguf_file))
    generation_path = model_path / "generation_config.json"
    generation = read_json_object(generation_path)
    end = generation.get("eos_token_id")
    if end is None:
        end = read_json_object(model_path / "config.json").get("eos_token_id")
    defaults: dict[str, float | int] = {}
    if mode == "auto":
        defaults = _sampling_defaults(generation, generation_path)
        if defaults:
            logger.info("sampling defaults from %s: %s", generation_path.name, defaults)
    return GenerationConfig(_end_ids(end, generation_path), defaults)


def _end_ids(value: object, path: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ConfigError(f"eos_token_id in {path.parent} must be a token id or a list of them.")
    return frozenset(ids)


def _sampling_defaults(generation: Mapping[str, object], path: Path) -> dict[str, float | int]:
    given = {key: generation[key] for key in DEFAULT_KEYS if generation.get(key) is not None}
    defaults: dict[str, float | int] = {}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key} in {path} must be a number, not {value!r}.")
        defaults[key] = value
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]
    except InvalidRequest as error:
        hint = "Correct it, or start with --generation-config none."
        raise ConfigError(f"{path}: {error} {hint}") from error
    return defaults
