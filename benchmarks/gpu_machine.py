"""The machine under test: its device, a clock for it, and what it can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Machine:
    """Where the checks run and how large they are. `seconds` times a function on the device;
    `busy_seconds` is how long the device itself worked while the function ran; in
    `forbid_waiting`, what makes the host wait for the device is an error."""

    description: str
    device: torch.device
    dtype: torch.dtype  # of the speed tables
    seconds: Callable[[Callable[[], object]], float]
    busy_seconds: Callable[[Callable[[], object]], float]
    forbid_waiting: Callable[[], AbstractContextManager[None]]
    copy_bytes: int
    matmul_size: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    mixes: tuple[tuple[list[int], int], ...]  # contexts of decodes, tokens of a prompt beside them
    draws: tuple[tuple[int, ...], tuple[int, ...]]  # vocabularies, batches
    prefill_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    block_size: int = 16


@dataclass(frozen=True)
class Rates:
    """What the same run measures the card to do at best."""

    machine: str
    copy_gb_s: float  # bytes read + bytes written
    matmul_tflop_s: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Rates:
        return cls(row["machine"], row["copy_gb_s"], row["matmul_tflop_s"])


class Clock(Protocol):
    """A device's queue, as timing uses it."""

    def host_seconds(self) -> float:
        """The host's time."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""

    def flush(self) -> None:
        """Queue what empties the device's caches."""

    def sleep(self, seconds: float) -> None:
        """Queue a pause of the device."""

    def mark(self) -> object:
        """Queue a mark in the device's time."""

    def between(self, start: object, end: object) -> float:
        """Seconds of the device from mark to mark, once both are past."""


def device_seconds(run: Callable[[], object], clock: Clock, repeats: int = 20) -> float:
    """Median time of the device for `run`, from cold caches and without the host's part in it.

    Launching takes Python longer than many a kernel runs. So the device sleeps until everything has
    been launched; a repeat whose launch took longer than the sleep is not counted, and the next one
    sleeps longer.
    """
    run()
    clock.synchronize()
    started = clock.host_seconds()
    run()
    pause = hiding_seconds(clock.host_seconds() - started)
    times: list[float] = []
    while len(times) < repeats:
        clock.synchronize()
        clock.flush()
        clock.sleep(pause)
        launched = clock.host_seconds()
        start = clock.mark()
        run()
        end = clock.mark()
        launching = clock.host_seconds() - launched
        clock.synchronize()
        if launching < pause:
            times.append(clock.between(start, end))
        else:
            pause = hiding_seconds(launching)
    return statistics.median(times)


def hiding_seconds(launching: float) -> float:
    """A pause that hides a launch of this length, with much to spare on a busy host."""
    return max(1e-3, 3 * launching)


def gpu_machine() -> Machine:
    """The current CUDA or ROCm device, with an 8B Llama's attention shape."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = _CudaClock(device)
    return Machine(
        description=f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}",
        device=device,
        dtype=torch.bfloat16,
        seconds=lambda run: device_seconds(run, clock),
        busy_seconds=_traced_seconds,
        forbid_waiting=_forbid_waiting,
        copy_bytes=4 << 30,
        matmul_size=8192,
        decode_batches=(1, 8, 32, 64, 256),
        decode_contexts=(1024, 4096, 8192, 32768),
        mixes=(
            ([1024] * 256, 512),
            ([1024] * 32, 128),
            ([1024] * 31 + [32768], 0),
            ([1024] * 31 + [32768], 512),
        ),
        draws=((128_256, 151_936), (1, 32, 256)),
        prefill_lens=(2048, 8192, 32768),
        num_heads=32,
        num_kv_heads=8,
    )


class _CudaClock:
    """CUDA events; the pause is a kernel that counts the multiprocessor's cycles."""

    _TRIAL_CYCLES = 10_000_000

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(256 << 20, dtype=torch.int8, device=device)  # beyond any L2
        self._cycles_a_second = 1.0
        torch.cuda._sleep(self._TRIAL_CYCLES)
        start = self.mark()
        torch.cuda._sleep(self._TRIAL_CYCLES)
        end = self.mark()
        self.synchronize()
        self._cycles_a_second = self._TRIAL_CYCLES / self.between(start, end)

    def host_seconds(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        self._flushed.zero_()

    def sleep(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_a_second))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


@contextmanager
def _forbid_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
        forbid_waiting=nullcontext,
        copy_bytes=1 << 20,
        matmul_size=64,
        decode_batches=(1, 2),
        decode_contexts=(40,),
        mixes=(([20] * 3, 5), ([20, 90], 0)),
        draws=((1100,), (2,)),
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
        machine.description,
        copy_gb_s=2 * machine.copy_bytes / copying / 1e9,
        matmul_tflop_s=2 * size**3 / multiplying / 1e12,
    )
