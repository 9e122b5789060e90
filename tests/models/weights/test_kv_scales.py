"""Scales of an eight-bit KV cache that come with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.errors import ConfigError
from serve.models.weights.checkpoint import Checkpoint, open_checkpoint
from serve.models.weights.kv_scales import is_kv_scale, read_kv_scales
from tests.tiny_models import PagedRun, full_logits, load, random_tokens, save_model

HEADS = [2, 2]


def with_tensors(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    """A tiny model's folder with these tensors added to its weights."""
    save_model(folder, "llama", num_hidden_layers=2, num_key_value_heads=2)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    return open_checkpoint(folder, "auto")


def scales(**spelled: float | list[float]) -> dict[str, Tensor]:
    """k0=0.5 → model.layers.0.self_attn.k_scale."""
    return {
        f"model.layers.{name[1]}.self_attn.{name[0]}_scale": torch.tensor(value)
        for name, value in spelled.items()
    }


def test_a_number_counts_for_all_heads_and_a_list_for_each(tmp_path: Path) -> None:
    stored = scales(k0=0.5, v0=[0.25], k1=[1.0, 2.0], v1=3.0)

    found = read_kv_scales(with_tensors(tmp_path, stored), HEADS)

    assert found is not None
    assert [scale.tolist() for scale in found] == [
        [[0.5, 0.5], [0.25, 0.25]],
        [[1.0, 2.0], [3.0, 3.0]],
    ]


@pytest.mark.parametrize("place", ["", "attn.", "k_proj.", "qkv_proj."])
def test_quantizers_put_them_in_different_places(place: str) -> None:
    assert is_kv_scale(f"model.layers.17.self_attn.{place}k_scale")
    assert not is_kv_scale(f"model.layers.17.self_attn.{place}weight_scale")
    assert not is_kv_scale(f"model.layers.17.mlp.{place}k_scale")


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    assert read_kv_scales(with_tensors(tmp_path, {}), HEADS) is None
    assert read_kv_scales(open_checkpoint(tmp_path, "dummy"), HEADS) is None


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        (scales(k0=1.0), "lack a positive k_scale or v_scale"),
        (scales(k0=1.0, v0=1.0, k1=0.0, v1=1.0), "lack a positive"),
        (scales(k0=[1.0, 1.0, 1.0]), r"k_scale has shape \[3\]"),
        (scales(k7=1.0), "does not fit the config's 2 layers"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, stored: dict[str, Tensor], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_kv_scales(with_tensors(tmp_path, stored), HEADS)


def test_a_cache_in_full_precision_ignores_them(tmp_path: Path) -> None:
    hf_model = save_model(tmp_path, "llama", num_hidden_layers=2, num_key_value_heads=2)
    file = tmp_path / "model.safetensors"
    stored = scales(k0=0.5, v0=0.5, k1=0.5, v1=0.5)
    save_file({**load_file(file), **stored}, file, metadata={"format": "pt"})
    tokens = random_tokens(9, seed=1)

    (logits,) = PagedRun(load(tmp_path), [tokens]).run([])

    assert (logits - full_logits(hf_model, tokens)).abs().max() < 1e-4
