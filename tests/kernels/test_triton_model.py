"""Whole tiny models on the Triton kernels, interpreted, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.kernels.triton import triton_kernels
from serve.models.checkpoint import open_checkpoint
from serve.models.registry import build_model
from tests.tiny_models import PagedRun, full_logits, random_tokens, save_model

SEQUENCES = [random_tokens(9, seed=1), random_tokens(14, seed=2)]
SCHEDULE = [[5, 0], [1, 13], [3, 1]]
BLOCK_SIZE = 8


@pytest.mark.parametrize(
    ("model_type", "impl", "batch_invariant"),
    [
        ("llama", "native", False),
        ("llama", "transformers", False),
        ("qwen3", "native", True),
        ("gemma2", "native", False),
    ],
)
def test_mixed_paged_steps_give_the_logits_of_one_full_forward(
    tmp_path: Path, model_type: str, impl: str, batch_invariant: bool
) -> None:
    hf_model = save_model(tmp_path, model_type, head_dim=16, num_hidden_layers=2)
    kernels = triton_kernels(batch_invariant=batch_invariant)
    model = build_model(
        open_checkpoint(tmp_path, "auto"),
        kernels=kernels,
        dtype=torch.float32,
        device=torch.device("cpu"),
        impl=impl,
        seed=0,
    )
    run = PagedRun(model, SEQUENCES, block_size=BLOCK_SIZE)
    run.kv = [
        torch.full(
            kernels.attention.kv_shape(len(kv[0]), BLOCK_SIZE, cache.num_kv_heads, cache.head_dim),
            float("nan"),
        )
        for kv, cache in zip(run.kv, model.cache_layers, strict=True)
    ]

    found = run.run(SCHEDULE)

    for logits, sequence in zip(found, SEQUENCES, strict=True):
        assert (logits - full_logits(hf_model, sequence)).abs().max() < 1e-4
