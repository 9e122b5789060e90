"""Loading parts of every layer: side by side they are the whole, and no rank keeps more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from serve.errors import ConfigError
from serve.kernels.stored import Blocks, dequantize
from serve.models.families import read_spec
from serve.models.weights.checkpoint import open_checkpoint
from serve.models.weights.loader import load_parameters
from serve.models.weights.parameters import (
    DecoderParameters,
    LinearParameters,
    MatrixSlot,
    Shard,
    allocate,
)
from tests.models.test_gguf import write_gguf
from tests.tiny_models import make_config, make_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 2}
CPU, WHOLE = torch.device("cpu"), Shard()


def loaded(path: Path, shard: Shard = WHOLE) -> DecoderParameters:
    checkpoint = open_checkpoint(path, "auto")
    spec = read_spec(checkpoint.hf_config, path)
    assert spec is not None
    parameters = allocate(spec, torch.float32, CPU, shard)
    load_parameters(parameters.by_name(), checkpoint)
    return parameters


def by_part(linear: LinearParameters) -> list[torch.Tensor]:
    return [slot.values() for slot in linear.parts.values()]


@pytest.mark.parametrize("stored", ["safetensors", Kind.Q8_0])
def test_slices_of_a_model_lie_side_by_side_in_the_whole(
    tmp_path: Path, stored: str | Kind
) -> None:
    model = make_model(make_config("qwen2", num_attention_heads=2, **SIZES))
    path = tmp_path
    if isinstance(stored, Kind):
        path = tmp_path / "m.gguf"
        write_gguf(path, model, "qwen2", stored)
    else:
        model.save_pretrained(tmp_path)
    whole = loaded(path)
    halves = [loaded(path, Shard(i, 2)) for i in range(2)]

    for layer, *shards in zip(whole.layers, *(half.layers for half in halves), strict=True):
        for name, dim in (("qkv", 0), ("gate_up", 0), ("output", 1), ("down", 1)):
            linears = [getattr(part, name) for part in shards]
            for expected, *found in zip(
                by_part(getattr(layer, name)), *map(by_part, linears), strict=True
            ):
                assert torch.equal(torch.cat(found, dim), expected)
        q_biases = [shard.qkv.bias[:32] for shard in shards]
        assert torch.equal(torch.cat(q_biases), layer.qkv.bias[:64])
    assert torch.equal(halves[1].embedding.values(), whole.embedding.values())
    if isinstance(stored, Kind):  # slices of blocks are blocks
        slots = halves[0].layers[0].down.parts.values()
        assert all(isinstance(slot.stored, Blocks) for slot in slots)


def test_a_model_that_cannot_be_cut_so_is_refused(tmp_path: Path) -> None:
    make_model(make_config("llama", num_attention_heads=2, **SIZES)).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="num_attention_heads 2 cannot be cut into 3"):
        loaded(tmp_path, Shard(0, 3))


def test_a_matrix_waits_for_its_packing_in_the_file(tmp_path: Path) -> None:
    model = make_model(make_config("llama", num_attention_heads=2, **SIZES))
    write_gguf(tmp_path / "m.gguf", model, "llama", Kind.Q8_0)

    slots = [t for t in loaded(tmp_path / "m.gguf").by_name().values() if isinstance(t, MatrixSlot)]

    kept = [slot.take(frozenset({"Q8_0"})) for slot in slots]
    assert all(isinstance(matrix, Blocks) for matrix in kept)
    assert all(
        torch.equal(dequantize(matrix), slot.values())
        for matrix, slot in zip(kept, slots, strict=True)
    )
