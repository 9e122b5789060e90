"""Worker: a device with a loaded model, its KV cache, and the runner that carries out plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from serve.config import EngineConfig
from serve.errors import ConfigError, OutOfMemory
from serve.kernels.select import select_kernels
from serve.kv_cache.storage import KVStorage, LayerShape, block_bytes
from serve.models.checkpoint import open_checkpoint
from serve.models.decoder import DecoderModel
from serve.models.registry import build_model, head_dims
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.worker import host_memory
from serve.worker.cache_size import GIB, CacheSize, longest_wanted, size_cache, token_budget
from serve.worker.device import Device, find_device
from serve.worker.executor import WorkerInfo
from serve.worker.graphs import capture_sizes
from serve.worker.model_runner import ModelRunner, layer_shapes, make_runner
from serve.worker.request_rows import RequestRows

logger = logging.getLogger(__name__)

_SMALLER_STEPS = "Lower --max-num-batched-tokens or --max-num-seqs."
_SMALLER_POOL = (
    "Lower --gpu-memory-utilization (or --kv-cache-memory-bytes, --num-gpu-blocks-override), name "
    "fewer --cudagraph-capture-sizes, or use --enforce-eager."
)


class Worker:
    """Everything on one device, from checkpoint to tokens. Ready when the constructor returns.

    Raises ConfigError for a model, a setting or a machine that cannot work.
    """

    info: WorkerInfo
    runner: ModelRunner

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._config = config
        self._device = find_device(config.device)
        checkpoint = open_checkpoint(model_path, config.model.load_format)
        self._dtype = self._device.resolve_dtype(config.model.dtype, checkpoint.dtype)
        self._kernels, why = select_kernels(
            self._device.name,
            config.device.attention_backend,
            dtype=self._dtype,
            head_dims=head_dims(checkpoint.hf_config),
            block_size=config.cache.block_size,
            num_threads=self._device.num_threads,
            batch_invariant=config.device.batch_invariant,
        )
        dtype_name = str(self._dtype).removeprefix("torch.")
        logger.info("model %s, in %s on %s", model_path.name, dtype_name, self._device.describe())
        logger.info("attention: %s", why)
        with _fitting(self._device, "the model", "Serve a smaller one, or in a narrower --dtype."):
            self._model = build_model(
                checkpoint,
                kernels=self._kernels,
                dtype=self._dtype,
                device=self._device.torch_device,
                impl=model_impl(config),
                seed=config.model.seed,
            )
        with _fitting(self._device, "the largest step", _SMALLER_STEPS):
            size = self._size_cache()
        with _fitting(self._device, f"a KV pool of {size.num_blocks} blocks", _SMALLER_POOL):
            self.runner = self._make_runner(
                num_blocks=size.num_blocks,
                num_host_blocks=size.num_host_blocks,
                max_model_len=size.max_model_len,
                graph_sizes=self._graph_sizes(),
            )
        self.info = WorkerInfo(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=self._model.vocab_size,
            max_model_len=size.max_model_len,
            max_num_batched_tokens=self._token_budget(size.max_model_len),
            device=self._device.name,
            dtype=dtype_name,
            attention_backend=self._kernels.name,
            block_bytes=block_bytes(self._layer_shapes(), self._dtype),
        )
        self._log_cache(size)

    def _size_cache(self) -> CacheSize:
        longest = longest_wanted(self._config, self._model.max_position)
        return size_cache(
            self._config,
            block_bytes=block_bytes(self._layer_shapes(), self._dtype),
            model_max_len=self._model.max_position,
            device_free_bytes=self._device.free_bytes(),
            host_total_bytes=host_memory.total_bytes(),
            measure_cache_bytes=lambda: self._device.cache_bytes(
                self._config.cache.gpu_memory_utilization, partial(self._run_largest_step, longest)
            ),
        )

    def _token_budget(self, max_model_len: int) -> int:
        default = self._device.default_token_budget
        return token_budget(self._config.scheduler, default, max_model_len)

    def _run_largest_step(self, max_model_len: int) -> None:
        """Run the most expensive step that can come, with all its tokens in the null block."""
        runner = self._make_runner(num_blocks=0, num_host_blocks=0, max_model_len=max_model_len)
        plan = largest_plan(
            self._token_budget(max_model_len),
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self._config.cache.block_size,
        )
        runner.execute(plan).wait()

    def _graph_sizes(self) -> list[int]:
        """Batch sizes of decode steps to record; none where recording is off or impossible."""
        settings = self._config.device
        if settings.enforce_eager or self._device.graph_recorder() is None:
            return []
        if not isinstance(self._model, DecoderModel) or self._model.needs_prompt_lens:
            # transformers' models, and RoPE by prompt length, compute on the host what a graph
            # would keep from the step it was recorded in.
            logger.info("decode steps run without CUDA graphs, which this model does not allow")
            return []
        return capture_sizes(settings.cudagraph_capture_sizes, self._config.scheduler.max_num_seqs)

    def _make_runner(
        self,
        *,
        num_blocks: int,
        num_host_blocks: int,
        max_model_len: int,
        graph_sizes: Sequence[int] = (),
    ) -> ModelRunner:
        device, block_size = self._device, self._config.cache.block_size
        storage = KVStorage(
            self._layer_shapes(),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            dtype=self._dtype,
            allocate=device.allocate_zeros,
            copy_blocks=self._kernels.copy_blocks,
            allocate_host=device.allocate_host,
        )
        rows = RequestRows(
            self._config.scheduler.max_num_seqs,
            max_blocks=-(-max_model_len // block_size),
            vocab_size=self._model.vocab_size,
            seed=self._config.model.seed,
            device=device,
        )
        mode = self._config.model.logprobs_mode
        return make_runner(
            self._model,
            storage,
            rows,
            block_size,
            device,
            logprobs_mode=mode,
            graph_sizes=graph_sizes,
            sampling=self._kernels.sampling,
        )

    def _layer_shapes(self) -> list[LayerShape]:
        return layer_shapes(self._model, self._kernels, self._config.cache.block_size)

    def _log_cache(self, size: CacheSize) -> None:
        block_size = self._config.cache.block_size
        one_block = block_bytes(self._layer_shapes(), self._dtype)
        tokens = size.num_blocks * block_size
        logger.info(
            "KV pool: %d blocks of %d tokens = %d tokens, %.2f GiB; "
            "%.1f requests of the greatest length (%d tokens) fit at once",
            size.num_blocks,
            block_size,
            tokens,
            size.num_blocks * one_block / GIB,
            tokens / size.max_model_len,
            size.max_model_len,
        )
        if size.num_host_blocks:
            gib = size.num_host_blocks * one_block / GIB
            logger.info("swap space: %d blocks, %.2f GiB", size.num_host_blocks, gib)


@contextmanager
def _fitting(device: Device, what: str, advice: str) -> Iterator[None]:
    """Running out of memory while starting is a ConfigError with the figures and what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        raise ConfigError(f"{what} does not fit on {device.describe()}. {advice}") from error


def model_impl(config: EngineConfig) -> str:
    """Which implementation of the model to ask for: transformers' multiplies by torch, whose
    rounding depends on the batch, so batch-invariant serving takes ours. Raises ConfigError."""
    wanted = config.model.model_impl
    if not config.device.batch_invariant:
        return wanted
    if wanted == "transformers":
        raise ConfigError(
            "--batch-invariant: --model-impl transformers multiplies matrices by torch, whose "
            "rounding depends on the batch; use --model-impl native."
        )
    return "native"


def largest_plan(
    budget: int, *, max_num_seqs: int, max_model_len: int, block_size: int
) -> SchedulerOutput:
    """A step that fills the token budget, samples for as many requests as may run, with every
    extra that costs memory, and keeps all K/V in the null block."""
    lengths = _split(budget, max_num_seqs, max_model_len)
    sampling = SamplingParams(
        temperature=1.0, top_p=0.99, min_p=0.01, presence_penalty=0.1, logprobs=20, max_tokens=1
    )
    scheduled, admitted = [], []
    for number, length in enumerate(lengths):
        request_id, tokens = f"largest-{number}", [0] * length
        blocks = [0] * -(-length // block_size)
        admitted.append(RowData(request_id, sampling, tokens, length, blocks))
        scheduled.append(ScheduledRequest(request_id, 0, length, tokens, [], samples=True))
    return SchedulerOutput(scheduled, admitted, [], [], [], [], sum(lengths))


def _split(budget: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Request lengths that add up to the budget if they can: a few long ones, the others 1."""
    left = budget - min(budget, max_num_seqs)  # each request has a first token already
    lengths = []
    for _ in range(min(budget, max_num_seqs)):
        more = min(left, max_model_len - 1)
        lengths.append(1 + more)
        left -= more
    return lengths
