"""What a client may know about the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve.messages import EngineReady
from serve.text.generation_config import GenerationConfig


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `names[0]` is the one that responses carry."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    generation_defaults: Mapping[str, float | int]


def served_model(
    names: tuple[str, ...], ready: EngineReady, generation: GenerationConfig, end_id: int | None
) -> ServedModel:
    """What is served, from what the engine and the model's files say; `end_id`: the tokenizer's."""
    end_ids = {*generation.eos_token_ids, *(() if end_id is None else (end_id,))}
    return ServedModel(
        names=names,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=frozenset(i for i in end_ids if i < ready.vocab_size),
        generation_defaults=dict(generation.sampling_defaults),
    )
