"""Models that our decoder does not know, served through transformers' attention interface."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from benchmarks.families import tiny_config, tiny_model
from serve.errors import ConfigError
from serve.kernels import reference
from serve.kernels.base import BackendLimits
from serve.models import transformers_batched, transformers_one_by_one
from serve.models.registry import build_model, head_dims
from serve.models.transformers_batched import Batched, check_mask
from serve.models.transformers_model import TransformersModel, measure_transformers_model
from serve.models.transformers_one_by_one import OneByOne
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


def save_tiny(folder: Path, model_type: str, **settings: Any) -> Any:
    """Write a tiny model of any family to a folder; returns the transformers model."""
    model = tiny_model(model_type, **settings)
    model.save_pretrained(folder)
    return model


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


def test_layers_that_keep_a_state_are_refused_by_the_config_alone(tmp_path: Path) -> None:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    config.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"'mamba' cannot be served: .* keep more than keys"):
        load(tmp_path, load_format="dummy")


def test_a_base_model_that_lies_deeper_is_found(tmp_path: Path) -> None:
    hf_model = save_tiny(tmp_path, "opt")
    model = load(tmp_path)

    found = PagedRun(model, SEQUENCES).run(MIXED_SCHEDULE)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-3
    assert isinstance(model, TransformersModel)
    assert isinstance(model.way, Batched)


@pytest.mark.parametrize("model_type", ["bloom", "llama4_text"])  # alibi; attention in chunks
def test_attention_of_a_models_own_runs_one_request_after_another(
    tmp_path: Path, model_type: str
) -> None:
    hf_model = save_tiny(tmp_path, model_type)
    model = load(tmp_path)

    found = PagedRun(model, SEQUENCES).run(MIXED_SCHEDULE)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-3
    assert isinstance(model, TransformersModel)
    assert isinstance(model.way, OneByOne)


def test_learned_positions_bound_the_context(tmp_path: Path) -> None:
    save_tiny(tmp_path, "roberta")  # its first position has number 1 + pad_token_id of 64

    assert load(tmp_path).max_position == 63


def test_a_model_that_reads_ahead_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", is_decoder=False)

    with pytest.raises(ConfigError, match="'bert' cannot be served: its tokens attend to later"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_way_that_computes_something_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    save_tiny(tmp_path, "gpt2")
    attend = transformers_batched._Step.attend
    assert isinstance(load_in(dtype, tmp_path).way, Batched)

    monkeypatch.setattr(
        *(transformers_batched._Step, "attend"),
        lambda *args, scale, **options: attend(*args, scale=2 * scale, **options),
    )
    assert isinstance(load_in(dtype, tmp_path).way, OneByOne)

    monkeypatch.setattr(transformers_one_by_one._PagedLayer, "get_seq_length", lambda self: 0)
    with pytest.raises(ConfigError, match=r"'gpt2' cannot be served: .* of its own forward"):
        load_in(dtype, tmp_path)


def load_in(dtype: torch.dtype, folder: Path) -> TransformersModel:
    model = build_model(
        open_checkpoint(folder, "auto"),
        kernels=reference.kernels(),
        dtype=dtype,
        device=torch.device("cpu"),
        impl="auto",
        seed=0,
    )
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("model_type", ["bloom", "deepseek_v3", "gemma3n_text", "mixtral"])
def test_the_config_alone_tells_the_caches_that_loading_makes(
    tmp_path: Path, model_type: str
) -> None:
    hf_model = save_tiny(tmp_path, model_type)

    measured = measure_transformers_model(open_checkpoint(tmp_path, "dummy"))

    assert measured.cache_layers == load(tmp_path).cache_layers
    assert measured.num_parameters == sum(p.numel() for p in hf_model.parameters())


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("mixtral", "more than those with a mixture of experts"),
        ("mpt", "one request after another"),
    ],
)
def test_the_log_says_how_a_model_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str, told: str
) -> None:
    tiny_config(model_type).save_pretrained(tmp_path)

    with caplog.at_level("INFO", logger="serve"):
        load(tmp_path, load_format="dummy")

    assert f"model type {model_type} runs as transformers' model" in caplog.text
    assert told in caplog.text


def test_masks_are_held_against_ours_at_the_models_true_lengths() -> None:
    cpu = torch.device("cpu")
    check_mask(causal_mask_function, None, 9000, cpu)
    check_mask(sliding_window_causal_mask_function(4096), 4096, 9000, cpu)
    chunks = chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long))
    check_mask(chunks, None, 8192, cpu)

    for sees, window, length in (
        (chunks, None, 8193),
        (sliding_window_causal_mask_function(4096), None, 4097),
        (sliding_window_causal_mask_function(4096), 4095, 9000),
        (bidirectional_mask_function, None, 9000),
    ):
        with pytest.raises(ConfigError, match="neither to all tokens before"):
            check_mask(sees, window, length, cpu)
    with pytest.raises(ConfigError, match="code of its own"):
        check_mask(None, None, 9000, cpu)


def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="'t5' is no causal language model"):
        load(tmp_path, load_format="dummy")


def test_head_sizes_are_unknown_where_there_are_no_heads(tmp_path: Path) -> None:
    from transformers import MambaConfig

    checkpoint = Checkpoint(tmp_path, "dummy", MambaConfig(), torch.float32, ())
    with pytest.raises(ConfigError, match=f"{tmp_path}: model type 'mamba' .* no attention heads"):
        head_dims(checkpoint)


def test_head_sizes_may_differ_by_layer(tmp_path: Path) -> None:
    tiny_config("gemma4_text", global_head_dim=16).save_pretrained(tmp_path)

    assert head_dims(open_checkpoint(tmp_path, "dummy")) == {8, 16}


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
