"""The engine core driven directly, step by step, with every step's size written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from serve.config import EngineConfig
from serve.engine.build import build_engine_core
from serve.engine.core import EngineCore
from serve.kernels.base import Kernels
from serve.kernels.select import select_kernels
from serve.messages import AddRequest, EngineReady, FromEngine, ToEngine
from serve.sampling_params import SamplingParams
from serve.scheduler.output import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class LoopRun:
    """What a run took. `steps`: (tokens, sampled tokens) of each."""

    seconds: float
    scheduler_s: float
    steps: list[tuple[int, int]]
    num_output_tokens: int


class EngineLoop:
    """A core whose scheduler is timed; nothing else runs in this process."""

    def __init__(self, core: EngineCore, ready: EngineReady) -> None:
        self.ready = ready
        self._core = core
        self._num_requests = 0
        self._scheduler_s = 0.0
        self._steps: list[tuple[int, int]] = []
        scheduler = core.scheduler
        schedule, update = scheduler.schedule, scheduler.update

        def timed_schedule() -> SchedulerOutput:
            begin = time.perf_counter()
            plan = schedule()
            self._scheduler_s += time.perf_counter() - begin
            if plan.scheduled:
                samples = sum(entry.num_samples for entry in plan.scheduled)
                self._steps.append((plan.num_scheduled_tokens, samples))
            return plan

        def timed_update(plan: SchedulerOutput, result: StepResult) -> Any:
            begin = time.perf_counter()
            deltas = update(plan, result)
            self._scheduler_s += time.perf_counter() - begin
            return deltas

        scheduler.schedule, scheduler.update = timed_schedule, timed_update  # type: ignore[method-assign]
        self.run([[([1000 + i for i in range(40)], 8)]])  # warm up

    def run(self, batches: Sequence[Sequence[tuple[list[int], int]]]) -> LoopRun:
        """Each batch of (prompt, output length) at once, one batch after the other."""
        self._scheduler_s, self._steps = 0.0, []
        num_output_tokens = 0
        begin = time.perf_counter()
        for batch in batches:
            for prompt, max_tokens in batch:
                self._core.handle(self._message(prompt, max_tokens))
            while self._core.has_work():
                for delta in self._core.step():
                    assert delta.error is None, delta.error
                    num_output_tokens += len(delta.token_ids)
        seconds = time.perf_counter() - begin
        return LoopRun(seconds, self._scheduler_s, self._steps, num_output_tokens)

    def close(self) -> None:
        """Free the model."""
        self._core.close()

    def _message(self, prompt: list[int], max_tokens: int) -> AddRequest:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return AddRequest(f"r{self._num_requests}", prompt, sampling, time.monotonic())


class _NoMail:
    """The core's inbox and outbox: everything is handed over by calls."""

    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        raise AssertionError(message)


def start_engine(
    config: EngineConfig, model: Path, kernels: Callable[[Kernels], Kernels]
) -> EngineLoop:
    """Load the model over kernels that `kernels` may wrap."""

    def select(*arguments: Any, **named: Any) -> tuple[Kernels, str]:
        chosen, why = select_kernels(*arguments, **named)
        return kernels(chosen), why

    mail = _NoMail()
    with mock.patch("serve.worker.startup.loading.select_kernels", select):
        core, ready = build_engine_core(config, model, mail, mail)
    return EngineLoop(core, ready)
