"""Every family's logits against transformers', whole and over a paged cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import (
    FAMILIES,
    MIXED_SCHEDULE,
    PagedRun,
    full_logits,
    load,
    random_tokens,
    save_model,
)

SEQUENCES = [random_tokens(21, seed=1), random_tokens(17, seed=2), random_tokens(29, seed=3)]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_mixed_paged_steps_give_the_logits_of_one_full_forward(
    tmp_path: Path, model_type: str, impl: str
) -> None:
    hf_model = save_model(tmp_path, model_type)

    found = PagedRun(load(tmp_path, impl), SEQUENCES).run(MIXED_SCHEDULE)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("gemma2", {"attn_logit_softcapping": 2.0}),
        ("gemma3_text", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    ],
)
def test_settings_of_a_family_are_honoured(
    tmp_path: Path, model_type: str, settings: dict[str, object]
) -> None:
    hf_model = save_model(tmp_path, model_type, **settings)

    found = PagedRun(load(tmp_path, "native"), SEQUENCES[:1]).run([[8], [1], [1]])

    assert (found[0] - full_logits(hf_model, SEQUENCES[0])).abs().max() < 1e-4


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_weights_with_fp32_arithmetic_are_transformers_with_rounded_weights(
    tmp_path: Path, model_type: str, impl: str, dtype: torch.dtype
) -> None:
    hf_model = save_model(tmp_path, model_type)
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if "norm" not in name or impl == "transformers":  # our decoder keeps norms in fp32
                parameter.copy_(parameter.to(dtype))

    found = PagedRun(load(tmp_path, impl, dtype=dtype), SEQUENCES[:1]).run([[8], [1], [1]])

    assert (found[0] - full_logits(hf_model, SEQUENCES[0])).abs().max() < 1e-4


def test_logits_are_the_same_bit_for_bit_however_a_prompt_is_chunked(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3_text")
    model = load(tmp_path)

    alone = PagedRun(model, SEQUENCES[:1]).run([])[0]
    chunked = PagedRun(model, SEQUENCES).run(MIXED_SCHEDULE)[0]

    assert torch.equal(alone, chunked)


def test_a_model_says_what_the_worker_must_know(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")

    model = load(tmp_path)

    assert model.vocab_size == 97
    assert model.max_position == 64
    assert [(c.num_kv_heads, c.head_dim) for c in model.cache_layers] == [(2, 8)] * 3
    assert not model.needs_prompt_lens
