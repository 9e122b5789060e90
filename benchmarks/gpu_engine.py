"""An engine on dummy weights, from a config.json alone, driven step by step in this process."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

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


@dataclass(frozen=True)
class Shape:
    """A Llama's config, and how hard it is driven."""

    config: dict[str, object]
    decode_batches: tuple[int, ...]
    decode_steps: int
    prompt_len: int
    completion_len: int
    num_requests: int
    long_prompt_len: int
    chunk: int  # most prompt tokens of a request in a step, where prompts are chunked
    step_budget: int  # tokens of a step, chunked or not
    company: int  # requests beside the one whose bits are compared
    contexts: tuple[tuple[int, int], ...]  # of decode steps: of all requests but one, of that one
    exact: tuple[int, int, int, int]  # exactness: layers, requests, longest prompt, completion
    settings: EngineConfig = field(default_factory=EngineConfig)

    def exactness(self) -> Shape:
        """A shallow model with the same kernels, for many engines one after another."""
        layers, requests, prompt, completion = self.exact
        return replace(
            self,
            config={**self.config, "num_hidden_layers": layers},
            num_requests=requests,
            prompt_len=prompt,
            completion_len=completion,
        )


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, wide: int, vocab: int
) -> dict[str, object]:
    """config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": wide,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def gpu_shape() -> Shape:
    """Llama 3.1 8B."""
    return Shape(
        config=llama(4096, 32, 32, 8, 14336, 128256),
        decode_batches=(1, 32, 128, 256),
        decode_steps=30,
        prompt_len=1024,
        completion_len=256,
        num_requests=256,
        long_prompt_len=7000,
        chunk=512,
        step_budget=8192,
        company=200,
        contexts=((1024, 1024), (8, 8), (1024, 30_000)),
        exact=(4, 40, 200, 40),
    )


def dry_shape() -> Shape:
    """Small enough for plain torch on a CPU."""
    return Shape(
        config=llama(32, 2, 4, 2, 64, 300),
        decode_batches=(1, 3),
        decode_steps=3,
        prompt_len=12,
        completion_len=4,
        num_requests=4,
        long_prompt_len=40,
        chunk=8,
        step_budget=8192,
        company=3,
        contexts=((20, 20), (8, 30)),
        exact=(1, 6, 40, 20),
        settings=EngineConfig(
            device=DeviceConfig(device="cpu", attention_backend="reference", cpu_threads=1),
            cache=CacheConfig(num_gpu_blocks_override=200),
            scheduler=SchedulerConfig(max_num_batched_tokens=Count(64)),
        ),
    )


class _NoMessages:
    """Inbox and outbox of a core that is driven by hand."""

    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        pass


@contextmanager
def engine(
    shape: Shape, settings: EngineConfig, dtype: Literal["auto", "float32"] = "auto"
) -> Iterator[EngineCore]:
    """A core over dummy weights; the device is free again afterwards."""
    settings = replace(settings, model=ModelConfig(load_format="dummy", dtype=dtype))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        core, _ = build_engine_core(settings, Path(folder), _NoMessages(), _NoMessages())
    try:
        yield core
    finally:
        core.close()
        del core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def request(name: str, prompt_len: int, max_tokens: int, seed: int = 0) -> AddRequest:
    """A greedy request with a prompt of its own."""
    prompt = torch.randint(
        3, 250, (prompt_len,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return AddRequest(name, prompt, sampling, arrival_time=time.monotonic())


def finish(core: EngineCore) -> dict[str, list[int]]:
    """Run until nothing is left; what each request got."""
    found: dict[str, list[int]] = {}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found
