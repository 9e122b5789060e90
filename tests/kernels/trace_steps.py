"""Serve random requests for some thousand steps on a fake GPU, and count what is compiled when.

`python -m tests.kernels.trace_steps STEPS [--batch-invariant]` prints a JSON object: the kernels
compiled until the engine was ready, and those compiled in steps after it. A process of its own,
with TRITON_INTERPRET=0. Nothing is computed: every token is the first of the vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from serve.config import (
    CacheConfig,
    Count,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from serve.engine.build import build_engine_core
from serve.engine.core import EngineCore
from serve.messages import AddRequest, FromEngine, ToEngine
from serve.sampling_params import SamplingParams
from serve.worker import worker
from serve.worker.device.kinds import CUDA
from tests.kernels import fake_gpu
from tests.worker.async_device import GraphDevice

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 200,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class FakeCudaDevice(GraphDevice):
    """What the worker takes for a GPU."""

    kind = CUDA


class _NoMessages:
    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        pass


def settings(batch_invariant: bool) -> EngineConfig:
    """A pool too small for what comes, so that requests are swapped, too."""
    return EngineConfig(
        model=ModelConfig(load_format="dummy", dtype="bfloat16"),
        cache=CacheConfig(num_gpu_blocks_override=300, swap_space=0.01),
        scheduler=SchedulerConfig(
            max_num_seqs=40, max_num_batched_tokens=Count(512), preemption_mode="swap"
        ),
        device=DeviceConfig(cudagraph_capture_sizes=(1, 8), batch_invariant=batch_invariant),
    )


def random_request(number: int, draw: random.Random) -> AddRequest:
    """Any length, any wishes."""
    sampling = SamplingParams(
        seed=number,
        temperature=draw.choice([0.0, 1.0]),
        top_k=draw.choice([0, 20]),
        top_p=draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
        logprobs=draw.choice([None, None, 2]),
        max_tokens=draw.randint(3, 60),
        min_tokens=draw.choice([0, 3]),
        ignore_eos=True,
    )
    length = draw.choice([1, 3, 17, 100, draw.randint(1, 3000)])
    prompt = [draw.randrange(200) for _ in range(length)]
    return AddRequest(f"r{number}", prompt, sampling, arrival_time=time.monotonic())


def serve(core: EngineCore, steps: int) -> None:
    """Requests come as others go."""
    draw, number = random.Random(0), 0
    for _ in range(steps):
        if core.scheduler.stats().num_waiting < 2 and draw.random() < 0.5:
            core.handle(random_request(number, draw))
            number += 1
        if core.has_work():
            for delta in core.step():
                assert delta.error is None, delta.error


def main(steps: str, *flags: str) -> None:
    gpu = fake_gpu.install()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        with mock.patch.object(worker, "find_device", return_value=FakeCudaDevice()):
            core, _ = build_engine_core(
                settings("--batch-invariant" in flags), Path(folder), _NoMessages(), _NoMessages()
            )
    ready = len(gpu.compiled)
    launched = gpu.num_launches
    serve(core, int(steps))
    stats = core.scheduler.stats()
    report = {
        "at start": gpu.compiled[:ready],
        "while serving": gpu.compiled[ready:],
        "launches": gpu.num_launches - launched,
        "swaps": stats.total_preemptions_swap,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
