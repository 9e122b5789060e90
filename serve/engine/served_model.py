"""What a client may know about the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `names[0]` is the one that responses carry."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, float | int]
