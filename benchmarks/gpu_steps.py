"""Decode steps of the whole engine: their time, the host's part in it, the device's idle part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu_engine import Shape, engine, finish, request
from benchmarks.gpu_machine import Machine, Rates
from benchmarks.gpu_plan import Row
from serve.engine.core import EngineCore
from serve.scheduler.output import SchedulerOutput, StepResult


def decode_step_rows(machine: Machine, shape: Shape, rates: Rates) -> Iterator[Row]:
    """A steady decode step with graphs and overlap on and off, also as a multiple of what reading
    the weights once takes at the copy bandwidth of this run."""
    for graphs in (True, False):
        settings = replace(
            shape.settings,
            device=replace(
                shape.settings.device,
                enforce_eager=not graphs,
                cudagraph_capture_sizes=shape.decode_batches,
            ),
        )
        with engine(shape, settings) as core:
            for overlap in (True, False):
                core.depth = 2 if overlap else 1
                for batch in shape.decode_batches:
                    measured = _steady_decode(core, batch, machine, shape, rates)
                    yield {"batch": batch, "graphs": graphs, "overlap": overlap, **measured}


def _steady_decode(
    core: EngineCore, batch: int, machine: Machine, shape: Shape, rates: Rates
) -> Row:
    """Of one step: its time, the host's work in it, the device's, and the share it idles."""
    steps = shape.decode_steps
    for number in range(batch):
        core.handle(request(f"r{number}", 8, 6 * steps, seed=number))
    while core.scheduler.stats().num_waiting:
        core.step()
    _take(core, steps)  # past the prompts, and warm
    with _Waiting(core) as waiting:
        started = time.perf_counter()
        _take(core, steps)
        seconds = (time.perf_counter() - started) / steps
    busy = machine.busy_seconds(lambda: _take(core, steps)) / steps
    core.scheduler.abort([f"r{number}" for number in range(batch)])
    finish(core)
    reading = weight_bytes(shape.config) / (rates.copy_gb_s * 1e9)
    return {
        "ms a step": seconds * 1e3,
        "ms of the host": (seconds - waiting.seconds / steps) * 1e3,
        "ms of the device": busy * 1e3,
        "device idle": max(0.0, 1 - busy / seconds),
        "times reading the weights": seconds / reading,
    }


def _take(core: EngineCore, steps: int) -> None:
    for _ in range(steps):
        core.step()


class _Waiting:
    """Adds up how long a core waits for the results of its steps; the rest is the host's work."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = 0.0
        self._executor: Any = core.executor
        self._launch = core.executor.execute

    def __enter__(self) -> _Waiting:
        self._executor.execute = self._execute
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.execute = self._launch

    def _execute(self, plan: SchedulerOutput) -> _Watched:
        return _Watched(self._launch(plan), self)


class _Watched:
    """A launched step that tells how long it was waited for."""

    def __init__(self, pending: Any, waiting: _Waiting) -> None:
        self._pending = pending
        self._waiting = waiting

    def wait(self) -> StepResult:
        started = time.perf_counter()
        result: StepResult = self._pending.wait()
        self._waiting.seconds += time.perf_counter() - started
        return result


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
