"""Decode steps of the whole engine: their time, the host's part in it, the device's idle part, and
whether anything in them waits for the device."""

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
from serve.worker.executor import TokenMask

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k and top_p": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0}},
    "allowed tokens": {"temperature": 0.0, "allowed_token_ids": [5, 6, 7]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": [9]},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": [[5, 6], [7]]},
}
"""What requests may ask of sampling; none of it may make the host wait for the device."""


def decode_step_rows(machine: Machine, shape: Shape, rates: Rates) -> Iterator[Row]:
    """A steady decode step, also as a multiple of what reading the weights and the context's keys
    and values takes at the copy bandwidth of this run; then with graphs and overlap off."""
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
            for contexts in shape.contexts if graphs else shape.contexts[:1]:
                for overlap in (True, False) if contexts == shape.contexts[0] else (True,):
                    core.depth = 2 if overlap else 1
                    for batch in shape.decode_batches:
                        if batch > 1 or contexts[0] == contexts[1]:
                            lengths = [contexts[0]] * (batch - 1) + [contexts[1]]
                            measured = _steady_decode(core, lengths, machine, shape, rates)
                            yield {
                                "batch": batch,
                                "context": contexts[0],
                                "longest": contexts[1],
                                "graphs": graphs,
                                "overlap": overlap,
                                **measured,
                            }


def waiting_rows(machine: Machine, shape: Shape) -> Iterator[Row]:
    """Decode steps in which whatever makes the host wait for the device is an error."""
    with engine(shape, shape.settings) as core:
        core.depth = 2
        for wish, values in WISHES.items():
            message = request("waiting", 8, 40)
            sampling = replace(message.sampling, seed=0, **values)
            core.handle(replace(message, sampling=sampling))
            _take(core, 4)
            why = None
            try:
                with machine.forbid_waiting():
                    _take(core, 8)
            except RuntimeError as error:
                why = str(error).splitlines()[0]
            core.scheduler.abort(["waiting"])
            finish(core)
            yield {"steps with": wish, "passed": why is None, **({"why": why} if why else {})}


def _steady_decode(
    core: EngineCore, lengths: list[int], machine: Machine, shape: Shape, rates: Rates
) -> Row:
    """Of one step: its time, the host's work in it, the device's, and the share it idles."""
    steps = shape.decode_steps
    for number, length in enumerate(lengths):
        core.handle(request(f"r{number}", length, 6 * steps, seed=number))
    while core.scheduler.stats().num_waiting:
        core.step()
    _take(core, steps)  # past the prompts, and warm
    with _Waiting(core) as waiting:
        started = time.perf_counter()
        _take(core, steps)
        seconds = (time.perf_counter() - started) / steps
    busy = machine.busy_seconds(lambda: _take(core, steps)) / steps
    core.scheduler.abort([f"r{number}" for number in range(len(lengths))])
    finish(core)
    core.scheduler.kv.prefixes.forget()
    reading = weight_bytes(shape.config) + sum(lengths) * kv_bytes(shape.config)
    return {
        "ms a step": seconds * 1e3,
        "ms of the host": (seconds - waiting.seconds / steps) * 1e3,
        "ms of the device": busy * 1e3,
        "device idle": max(0.0, 1 - busy / seconds),
        "times reading": seconds / (reading / (rates.copy_gb_s * 1e9)),
    }


def _take(core: EngineCore, steps: int) -> None:
    for _ in range(steps):
        core.step()


class _Waiting:
    """Adds up how long a core waits for the results of its steps; the rest is the host's work."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = 0.0
        self._executor: Any = core.executor
        self._launch = core.executor.forward

    def __enter__(self) -> _Waiting:
        self._executor.forward = self._forward
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.forward = self._launch

    def _forward(self, plan: SchedulerOutput) -> _Watched:
        return _Watched(self._launch(plan), self)


class _Watched:
    """A launched step that tells how long it was waited for."""

    def __init__(self, pending: Any, waiting: _Waiting) -> None:
        self._pending = pending
        self._waiting = waiting

    def sample(self, mask: TokenMask | None) -> _Watched:
        self._pending = self._pending.sample(mask)
        return self

    def wait(self) -> StepResult:
        started = time.perf_counter()
        result: StepResult = self._pending.wait()
        self._waiting.seconds += time.perf_counter() - started
        return result


def weight_bytes(config: dict[str, object]) -> int:
    """Bytes of all weights a decode step reads, in bfloat16 (the embedding is looked up)."""
    hidden, wide, layers, vocab, heads, kv_heads = _sizes(
        config,
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    return 2 * (layers * (attention + 3 * hidden * wide) + hidden * vocab)


def kv_bytes(config: dict[str, object]) -> int:
    """Bytes of one token's keys and values in all layers, in bfloat16."""
    hidden, layers, heads, kv_heads = _sizes(
        config, "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    )
    return 2 * 2 * layers * kv_heads * hidden // heads


def _sizes(config: dict[str, object], *names: str) -> list[int]:
    return [int(str(config[name])) for name in names]
