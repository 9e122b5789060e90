"""The whole engine on dummy weights: step times, throughput under load, swap, batch invariance.

Each measurement builds an engine with the settings under test from a config.json alone, so that no
checkpoint is needed, and drives its core in this process.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.gpu_machine import Machine, Rates
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

Row = dict[str, float]


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
    company: int  # requests beside the one whose bits are compared
    settings: EngineConfig = field(default_factory=EngineConfig)


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
        "max_position_embeddings": 8192,
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
        company=200,
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
        company=3,
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
def engine(shape: Shape, settings: EngineConfig) -> Iterator[EngineCore]:
    """A core over dummy weights; the device is free again afterwards."""
    settings = replace(settings, model=ModelConfig(load_format="dummy"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config))
        core, _ = build_engine_core(settings, Path(folder), _NoMessages(), _NoMessages())
    try:
        yield core
    finally:
        core.executor.close()
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


# ---------------------------------------------------------------------------- decode steps


def decode_step_table(shape: Shape, rates: Rates) -> list[Row]:
    """Time of a decode step with graphs and overlap on and off, also as a multiple of what reading
    the weights once takes at the copy bandwidth of this run."""
    rows = []
    for graphs, overlap in ((True, True), (True, False), (False, True), (False, False)):
        settings = replace(
            shape.settings,
            device=replace(
                shape.settings.device,
                enforce_eager=not graphs,
                cudagraph_capture_sizes=shape.decode_batches,
            ),
            scheduler=replace(
                shape.settings.scheduler, async_scheduling="on" if overlap else "off"
            ),
        )
        with engine(shape, settings) as core:
            rows += [
                {"batch": batch, "graphs": graphs, "overlap": overlap}
                | _time_decode(core, batch, shape, rates)
                for batch in shape.decode_batches
            ]
    return rows


def _time_decode(core: EngineCore, batch: int, shape: Shape, rates: Rates) -> Row:
    """Steady decode: time per step, and the part of it in which Python was busy."""
    length = 4 * shape.decode_steps
    for number in range(batch):
        core.handle(request(f"r{number}", 8, length, seed=number))
    launch, host = core.executor.execute, []

    while core.scheduler.stats().num_waiting:
        core.step()
    for _ in range(shape.decode_steps):  # past the prompts, and warm
        core.step()

    def timed(plan):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        pending = launch(plan)
        host.append(time.perf_counter() - started)
        return pending

    core.executor.execute = timed  # type: ignore[method-assign]
    started = time.perf_counter()
    for _ in range(shape.decode_steps):
        core.step()
    seconds = (time.perf_counter() - started) / shape.decode_steps
    core.executor.execute = launch  # type: ignore[method-assign]
    core.scheduler.abort([f"r{number}" for number in range(batch)])
    finish(core)
    reading = weight_bytes(shape.config) / (rates.copy_gb_s * 1e9)
    return {
        "ms a step": seconds * 1e3,
        "ms launching": statistics.median(host) * 1e3,
        "times reading the weights": seconds / reading,
    }


def weight_bytes(config: dict[str, object]) -> int:
    """Bytes of all weights a decode step reads, in bfloat16 (the embedding is looked up)."""
    hidden, wide, layers, vocab, heads, kv_heads = (
        int(str(config[name]))
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return 2 * (layers * (attention + 3 * hidden * wide) + hidden * vocab)


# ---------------------------------------------------------------------------- load


def load_table(shape: Shape) -> list[Row]:
    """Tokens per second with all requests given at once, and how long running requests wait for
    their next token while long prompts come in, with chunked prefill and without."""
    rows = []
    for chunked in (True, False):
        scheduler = replace(
            shape.settings.scheduler,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=shape.settings.scheduler.max_num_batched_tokens
            if chunked
            else Count(8192),
        )
        with engine(shape, replace(shape.settings, scheduler=scheduler)) as core:
            started = time.perf_counter()
            for number in range(shape.num_requests):
                core.handle(request(f"r{number}", shape.prompt_len, shape.completion_len, number))
            generated = sum(len(tokens) for tokens in finish(core).values())
            seconds = time.perf_counter() - started
            gaps = _gaps_under_long_prompts(core, shape)
        rows.append(
            {
                "chunked": chunked,
                "tokens/s": generated / seconds,
                "median gap ms": statistics.median(gaps) * 1e3,
                "p99 gap ms": gaps[int(0.99 * len(gaps))] * 1e3,
            }
        )
    return rows


def _gaps_under_long_prompts(core: EngineCore, shape: Shape) -> list[float]:
    """Seconds between tokens of decoding requests, ascending; a long prompt joins every 8 steps."""
    names = [f"short{number}" for number in range(shape.decode_batches[1])]
    for number, name in enumerate(names):
        core.handle(request(name, 8, shape.completion_len, seed=number))
    last: dict[str, float] = {}
    gaps, step = [], 0
    while core.has_work():
        if step % 8 == 0 and step < 8 * 6:
            core.handle(request(f"long{step}", shape.long_prompt_len, 1, seed=1000 + step))
        for delta in core.step():
            if delta.request_id in names and delta.token_ids:
                now = time.perf_counter()
                gaps += [now - last[delta.request_id]] if delta.request_id in last else []
                last[delta.request_id] = now
        step += 1
    return sorted(gaps)


# ---------------------------------------------------------------------------- swap


def swap_table(machine: Machine) -> list[Row]:
    """Blocks to host memory and back through the copy kernel, beside one plain pinned copy."""
    from serve.kernels.triton import triton_kernels

    kernels = triton_kernels()
    on_gpu = machine.device.type == "cuda"
    num_blocks = 4096 if on_gpu else 8
    shape = kernels.attention.kv_shape(
        num_blocks, machine.block_size, machine.num_kv_heads, machine.head_dim
    )
    device = torch.zeros(shape, dtype=machine.dtype, device=machine.device)
    host = torch.zeros(shape, dtype=machine.dtype, pin_memory=on_gpu)
    shuffled, ordered = torch.randperm(num_blocks), torch.arange(num_blocks)
    if on_gpu:
        shuffled, ordered = shuffled.pin_memory(), ordered.pin_memory()
    size = device.numel() * device.element_size()
    rows = []
    for way, source, target in (("out", device, host), ("in", host, device)):
        swapping = machine.seconds(
            lambda s=source, t=target: kernels.copy_blocks(s, t, shuffled, ordered)  # type: ignore[misc]
        )
        plain = machine.seconds(lambda s=source, t=target: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        rows.append(
            {
                "into the GPU": way == "in",
                "GB/s": size / swapping / 1e9,
                "plain GB/s": size / plain / 1e9,
                "share of plain": plain / swapping,
            }
        )
    return rows


# ---------------------------------------------------------------------------- batch invariance


def invariance(shape: Shape) -> list[Row]:
    """Whether a request's tokens and logprobs are the same bits alone and among others."""
    settings = replace(shape.settings, device=replace(shape.settings.device, batch_invariant=True))
    with engine(shape, settings) as core:
        alone = _scores(core, shape, company=0)
        among = _scores(core, shape, company=shape.company)
    return [
        {
            "company": shape.company,
            "tokens": len(alone),
            "equal bits": sum(a == b for a, b in zip(alone, among, strict=True)),
        }
    ]


def _scores(core: EngineCore, shape: Shape, company: int) -> Sequence[tuple[int, float]]:
    core.handle(_scored(request("one", shape.prompt_len, shape.completion_len, seed=5)))
    for number in range(company):
        core.handle(request(f"r{number}", shape.prompt_len // 2 + number, 16, seed=number))
    found = []
    while core.has_work():
        for delta in core.step():
            if delta.request_id == "one":
                scores = delta.logprobs or []
                found += [(s.token_id, s.logprob) for s in scores]
    core.scheduler.forget_prefixes()
    return found


def _scored(message: AddRequest) -> AddRequest:
    return replace(message, sampling=replace(message.sampling, logprobs=0))
