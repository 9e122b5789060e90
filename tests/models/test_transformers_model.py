"""Models that our decoder does not know, served through transformers' attention interface."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from serve.errors import ConfigError
from serve.kernels import reference
from serve.kernels.base import BackendLimits
from serve.models.registry import build_model, head_dims
from serve.models.weights.checkpoint import Checkpoint, open_checkpoint
from tests.tiny_models import (
    MIXED_SCHEDULE,
    OTHERS,
    PagedRun,
    full_logits,
    load,
    make_config,
    make_model,
    random_tokens,
    save_model,
)

SEQUENCES = [random_tokens(21, seed=1), random_tokens(17, seed=2), random_tokens(29, seed=3)]


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_models_give_transformers_logits_over_the_paged_cache(
    tmp_path: Path, model_type: str
) -> None:
    hf_model = save_model(tmp_path, model_type)

    found = PagedRun(load(tmp_path), SEQUENCES).run(MIXED_SCHEDULE)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-4


def test_logits_are_scaled_as_the_model_scales_them(tmp_path: Path) -> None:
    hf_model = save_model(tmp_path, "gemma2")

    found = PagedRun(load(tmp_path, "transformers"), SEQUENCES[:1]).run([])

    assert found[0].abs().max() < 3.0  # its final_logit_softcapping
    assert (found[0] - full_logits(hf_model, SEQUENCES[0])).abs().max() < 1e-4


def test_the_checkpoints_config_is_left_alone(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    checkpoint = open_checkpoint(tmp_path, "auto")
    before = checkpoint.hf_config.to_dict()

    load(tmp_path)
    make_model(checkpoint.hf_config)

    assert checkpoint.hf_config.to_dict() == before


def test_a_missing_tensor_is_an_error_and_not_a_random_weight(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path, "gpt2")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"missing tensors: transformer\.h\.1\.attn\.c_attn"):
        load(tmp_path)


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    make_model(config).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="'mamba'"):
        load(tmp_path)


def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="'t5' is no causal language model"):
        load(tmp_path, load_format="dummy")


def test_head_sizes_are_unknown_where_there_are_no_heads(tmp_path: Path) -> None:
    from transformers import MambaConfig

    checkpoint = Checkpoint(tmp_path, "dummy", MambaConfig(), torch.float32, ())
    with pytest.raises(ConfigError, match=f"{tmp_path}: only models with attention heads"):
        head_dims(checkpoint)


def test_head_sizes_that_the_kernels_cannot_take_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    attention = reference.ReferenceAttention()
    attention.limits = BackendLimits(head_dims=(16, 32))

    with pytest.raises(ConfigError, match="heads of size 8"):
        build_model(
            open_checkpoint(tmp_path, "auto"),
            kernels=dataclasses.replace(reference.kernels(), attention=attention),
            dtype=torch.float32,
            device=torch.device("cpu"),
            impl="auto",
            seed=0,
        )


def test_dummy_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    make_config("gpt2").save_pretrained(tmp_path)

    first, second = (
        PagedRun(load(tmp_path, load_format="dummy"), SEQUENCES[:1]).run([]) for _ in range(2)
    )

    assert torch.equal(first[0], second[0])


def test_longrope_is_served_up_to_the_length_where_a_batch_would_change_it(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    save_model(
        tmp_path,
        "phi3",
        rope_parameters={**scaling, "rope_theta": 10000.0},
        original_max_position_embeddings=16,
    )

    assert load(tmp_path).max_position == 16
