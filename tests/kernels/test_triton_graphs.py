"""A decoder on the Triton kernels, interpreted, replayed as a GPU replays a recorded graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.kernels.triton import triton_kernels
from serve.kv_cache.storage import KVStorage
from serve.models.registry import build_model
from serve.models.weights.checkpoint import open_checkpoint
from serve.sampling_params import SamplingParams
from serve.worker import graphs
from serve.worker.model_runner import ModelRunner, layer_shapes, make_runner
from serve.worker.request_rows import RequestRows
from tests.tiny_models import random_tokens, save_model
from tests.worker.async_device import GraphDevice
from tests.worker.harness import Asked, plan, row_data, share

BLOCK_SIZE = 8
MAX_BLOCKS = 64  # contexts long enough for the graph to split them, though these are short
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {"a": random_tokens(9, seed=1), "b": random_tokens(4, seed=2)}


def tokens_of(runner: ModelRunner) -> dict[str, list[int]]:
    """Four greedy tokens of each prompt, decoded together."""
    admitted = [
        row_data("a", Asked(GREEDY, prompt=PROMPTS["a"]), [3, 1]),
        row_data("b", Asked(GREEDY, prompt=PROMPTS["b"]), [5, 2]),
    ]
    prefill = plan([share(n, 0, prompt) for n, prompt in PROMPTS.items()], admitted=admitted)
    found = {name: list(t) for name, t in runner.execute(prefill).wait().token_ids.items()}
    for number in range(3):
        step = plan(
            [share(n, len(PROMPTS[n]) + number, tokens[-1:]) for n, tokens in found.items()]
        )
        for name, new in runner.execute(step).wait().token_ids.items():
            found[name] += new
    return found


def test_a_replayed_decoder_gives_the_tokens_of_an_eager_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the step with both prompts, too; interpreted, one with room for more takes a minute."""
    monkeypatch.setattr(graphs, "_PROMPT_TOKENS", (16,))
    save_model(tmp_path, "qwen3", head_dim=16, num_hidden_layers=2)
    kernels, device = triton_kernels(), GraphDevice()
    model = build_model(
        open_checkpoint(tmp_path, "auto"),
        kernels=kernels,
        dtype=torch.float32,
        device=device.torch_device,
        impl="native",
        seed=0,
    )

    def runner(graph_sizes: tuple[int, ...]) -> ModelRunner:
        storage = KVStorage(
            layer_shapes(model, kernels, BLOCK_SIZE),
            num_blocks=6,
            num_host_blocks=0,
            dtype=torch.float32,
            allocate=device.allocate_zeros,
            copy_blocks=kernels.copy_blocks,
            allocate_host=device.allocate_host,
        )
        rows = RequestRows(4, max_blocks=MAX_BLOCKS, vocab_size=model.vocab_size, device=device)
        return make_runner(model, storage, rows, BLOCK_SIZE, device, graph_sizes=graph_sizes)

    replayed = tokens_of(runner((3,)))
    assert [graph.num_replays for graph in device.recorder.graphs] == [1, 3]
    assert replayed == tokens_of(runner(()))
