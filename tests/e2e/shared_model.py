"""One loaded model under many engines: the settings change, the weights stay.

The engine is the real one from scheduler to kernels; only the worker's start is done by hand, so
that a sweep over settings loads the model once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.engine.build import core_over
from serve.engine.core import EngineCore
from serve.kernels.base import Kernels
from serve.kernels.select import select_kernels
from serve.kv_cache.storage import KVStorage
from serve.messages import AddRequest, EngineStats, FromEngine, ToEngine, TokenLogprobs
from serve.models.base import CausalModel
from serve.models.registry import build_model, head_dims
from serve.models.weights.checkpoint import Checkpoint, open_checkpoint
from serve.sampling_params import SamplingParams
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import SchedulerOutput
from serve.worker.device.cpu_device import CpuDevice
from serve.worker.executor import Launch, WorkerInfo
from serve.worker.model_runner import ModelRunner, layer_shapes, make_runner
from serve.worker.request_rows import RequestRows

MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Engine:
    """Settings that must not change any answer."""

    max_num_seqs: int = 32
    budget: int = 2048
    block_size: int = 16
    num_blocks: int = 4096
    chunking: bool = True
    preemption_mode: str = "recompute"
    num_host_blocks: int = 0

    def config(self) -> EngineConfig:
        return EngineConfig(
            cache=CacheConfig(block_size=self.block_size),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                enable_chunked_prefill=self.chunking,
                preemption_mode=self.preemption_mode,  # type: ignore[arg-type]
            ),
        )


@dataclass
class Completion:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class SharedModel:
    """A real model on this CPU, with weights as stored or quantized."""

    def __init__(
        self,
        path: Path,
        backend: str = "auto",
        *,
        quantization: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path, "auto")
        self.device = CpuDevice(num_threads)
        self.kernels: Kernels = self._kernels(backend, quantization)
        self.model: CausalModel = build_model(
            self.checkpoint,
            kernels=self.kernels,
            dtype=torch.float32,
            device=self.device.torch_device,
            impl="auto",
            seed=0,
        )

    def run(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> tuple[list[Completion], EngineStats]:
        """Run all prompts to their ends, checking the scheduler's books after every step."""
        return answer(self.start(engine), prompts, sampling)

    def start(self, engine: Engine) -> EngineCore:
        """An engine that keeps its cache from one load to the next; see `answer`."""
        core, _ = core_over(_SharedExecutor(self, engine), engine.config(), _NoMail(), _NoMail())
        return core

    def make_runner(self, engine: Engine) -> ModelRunner:
        """A runner with a cache of its own over the shared weights."""
        storage = KVStorage(
            layer_shapes(self.model, self.kernels, engine.block_size),
            num_blocks=engine.num_blocks,
            num_host_blocks=engine.num_host_blocks,
            dtype=torch.float32,
            allocate=self.device.allocate_zeros,
            copy_blocks=self.kernels.copy_blocks,
            allocate_host=self.device.allocate_host,
        )
        rows = RequestRows(
            engine.max_num_seqs,
            max_blocks=-(-MAX_MODEL_LEN // engine.block_size),
            vocab_size=self.model.vocab_size,
            device=self.device,
        )
        return make_runner(
            *(self.model, storage, rows, engine.block_size, self.device),
            sampling=self.kernels.sampling,
        )

    def _kernels(self, backend: str, quantization: str | None) -> Kernels:
        kernels, _ = select_kernels(
            "cpu",
            backend,
            dtype=torch.float32,
            head_dims=head_dims(self.checkpoint),
            block_size=16,
            num_threads=self.device.num_threads,
            quantization=quantization,
        )
        return kernels


def answer(
    core: EngineCore,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> tuple[list[Completion], EngineStats]:
    """Run all prompts to their ends, checking the scheduler's books after every step."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        core.handle(AddRequest(str(number), prompt, params, arrival_time=float(number)))
    completions = [Completion() for _ in prompts]
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            completion = completions[int(delta.request_id)]
            completion.token_ids += delta.token_ids
            completion.logprobs += delta.logprobs or []
            completion.prompt_logprobs += delta.prompt_logprobs or []
        check_scheduler(core.scheduler)
    stats = core.scheduler.stats()
    assert stats.num_blocks_used == stats.num_host_blocks_used == 0
    return completions, stats


class _SharedExecutor:
    """Executor over a model that is loaded already."""

    def __init__(self, shared: SharedModel, engine: Engine) -> None:
        self._shared = shared
        self._engine = engine
        self._runner: ModelRunner | None = None

    def start(self) -> WorkerInfo:
        self._runner = self._shared.make_runner(self._engine)
        return WorkerInfo(
            num_blocks=self._engine.num_blocks,
            num_host_blocks=self._engine.num_host_blocks,
            vocab_size=self._shared.model.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=self._engine.budget,
            device="cpu",
            dtype="float32",
            attention_backend=self._shared.kernels.name,
            prompt_limits=tuple(self._shared.model.prompt_limits),
        )

    def forward(self, plan: SchedulerOutput) -> Launch:
        assert self._runner is not None
        assert plan.num_scheduled_tokens <= self._engine.budget
        return self._runner.forward(plan)

    def close(self) -> None:
        self._runner = None


class _NoMail:
    """The core is driven by hand, so nothing goes in or out by post."""

    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        raise AssertionError(message)


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy, with no early end, so that lengths are known."""
    return replace(SamplingParams(temperature=0.0), max_tokens=max_tokens, ignore_eos=True)
