"""The machine under test: its device, a clock for it, and what it can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """Where the checks run and how large they are. `seconds` times a function on the device;
    `busy_seconds` is how long the device itself worked while the function ran."""

    description: str
    device: torch.device
    dtype: torch.dtype  # of the speed tables
    seconds: Callable[[Callable[[], object]], float]
    busy_seconds: Callable[[Callable[[], object]], float]
    copy_bytes: int
    matmul_size: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    prefill_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16


@dataclass(frozen=True)
class Rates:
    """What the same run measures the card to do at best."""

    copy_gb_s: float  # bytes read + bytes written
    matmul_tflop_s: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def gpu_machine() -> Machine:
    """The current CUDA or ROCm device, with an 8B Llama's attention shape."""
    device = torch.device("cuda", torch.cuda.current_device())
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)  # larger than any L2 cache

    def seconds(run: Callable[[], object], repeats: int = 20) -> float:
        """Median over repeats with a cold cache. The flush also hides the launch behind it."""
        run()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    return Machine(
        description=f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}",
        device=device,
        dtype=torch.bfloat16,
        seconds=seconds,
        busy_seconds=_traced_seconds,
        copy_bytes=4 << 30,
        matmul_size=8192,
        decode_batches=(1, 8, 32, 64, 256),
        decode_contexts=(1024, 4096, 8192, 32768),
        prefill_lens=(2048, 8192, 32768),
        num_heads=32,
        num_kv_heads=8,
    )


def _traced_seconds(run: Callable[[], object]) -> float:
    """The time in which at least one kernel or copy ran, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    return covered(spans) / 1e6


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what spans, ascending by their starts, cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def dry_machine() -> Machine:
    """A CPU with Triton's interpreter, and sizes that take seconds there."""

    def seconds(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return Machine(
        description="dry run on a CPU",
        device=torch.device("cpu"),
        dtype=torch.float32,
        seconds=seconds,
        busy_seconds=seconds,
        copy_bytes=1 << 20,
        matmul_size=64,
        decode_batches=(1, 2),
        decode_contexts=(40,),
        prefill_lens=(40,),
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
    )


def measure_rates(machine: Machine) -> Rates:
    """Copy bandwidth of device memory and the matmul rate in the speed tables' dtype."""
    source = torch.empty(machine.copy_bytes, dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    copying = machine.seconds(lambda: target.copy_(source))
    size = machine.matmul_size
    a, b = (torch.randn(size, size, device=machine.device).to(machine.dtype) for _ in range(2))
    multiplying = machine.seconds(lambda: a @ b)
    return Rates(
        copy_gb_s=2 * machine.copy_bytes / copying / 1e9,
        matmul_tflop_s=2 * size**3 / multiplying / 1e12,
    )
