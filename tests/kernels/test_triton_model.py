"""Whole tiny models on the Triton kernels, interpreted, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.kernels.triton import triton_kernels
from serve.models.registry import build_model
from serve.models.rope import KINDS
from serve.models.weights.checkpoint import open_checkpoint
from tests.kernels.ragged import relative_error
from tests.models.test_rope import LONG, ORIGINAL, SCALINGS, SHORT
from tests.tiny_models import PagedRun, full_logits, load, random_tokens, save_model

SEQUENCES = [random_tokens(9, seed=1), random_tokens(14, seed=2)]
SCHEDULE = [[5, 0], [1, 13], [3, 1]]
BLOCK_SIZE = 8


def triton_run(folder: Path, sequences: list[list[int]], **settings: Any) -> PagedRun:
    """Steps of a saved model over the Triton kernels, with NaN in every slot of the cache."""
    kernels = triton_kernels(batch_invariant=settings.pop("batch_invariant", False))
    model = build_model(
        open_checkpoint(folder, "auto"),
        kernels=kernels,
        dtype=torch.float32,
        device=torch.device("cpu"),
        impl=settings.pop("impl", "native"),
        seed=0,
    )
    run = PagedRun(model, sequences, block_size=BLOCK_SIZE)
    run.kv = [
        torch.full(
            kernels.attention.kv_shape(len(kv[0]), BLOCK_SIZE, cache.num_kv_heads, cache.head_dim),
            float("nan"),
        )
        for kv, cache in zip(run.kv, model.cache_layers, strict=True)
    ]
    return run


@pytest.mark.parametrize(
    ("model_type", "impl", "batch_invariant"),
    [
        ("llama", "native", False),
        ("llama", "transformers", False),
        ("qwen3", "native", True),
        ("gemma2", "native", False),
        ("gemma3_text", "native", False),
    ],
)
def test_mixed_paged_steps_give_the_logits_of_one_full_forward(
    tmp_path: Path, model_type: str, impl: str, batch_invariant: bool
) -> None:
    hf_model = save_model(tmp_path, model_type, head_dim=16, num_hidden_layers=2)

    run = triton_run(tmp_path, SEQUENCES, impl=impl, batch_invariant=batch_invariant)

    for logits, sequence in zip(run.run(SCHEDULE), SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_ops_15_every_rope_kind_is_rotated_below_and_above_the_original_length(
    tmp_path: Path, kind: str
) -> None:
    scaling = {
        name: value * 2 if isinstance(value, list) else value  # a factor for each of 8 frequencies
        for name, value in SCALINGS[kind].items()
    }
    hf_model = save_model(
        tmp_path,
        head_dim=16,
        num_hidden_layers=1,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": 500.0, **scaling},
    )
    for tokens in (SHORT, LONG) if kind != "default" else (SHORT,):
        (logits,) = triton_run(tmp_path, [tokens]).run([])
        assert (logits - full_logits(hf_model, tokens)).abs().max() < 1e-4


def test_an_e4m3_cache_changes_logits_by_its_own_rounding_only(tmp_path: Path) -> None:
    """The same model over the reference kernels, whose cache rounds alike, has the same logits."""
    save_model(tmp_path, "qwen3", head_dim=16, num_hidden_layers=2)
    scales = [torch.rand(2, 2) * 0.02 + 0.01 for _ in range(2)]
    runs = [triton_run(tmp_path, SEQUENCES), PagedRun(load(tmp_path), SEQUENCES, BLOCK_SIZE)]
    for run in runs:
        run.kv = [kv.to(torch.float8_e4m3fn) for kv in run.kv]
        run.kv_scales = scales

    ours, twins = (run.run(SCHEDULE) for run in runs)

    for logits, expected in zip(ours, twins, strict=True):
        # A key that the two round to either side of an edge moves a logit a little.
        assert relative_error(logits, expected.double()) < 2e-2
