"""Worker: a device with a loaded model, its KV cache, and the runner that carries out plans."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from serve.config import EngineConfig
from serve.kv_cache.storage import KVStorage, LayerShape, block_bytes
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.kv_scales import read_kv_scales
from serve.worker.block_file import BlockFile
from serve.worker.device import host_memory
from serve.worker.device.device import Device
from serve.worker.device.find_device import find_device
from serve.worker.executor import WorkerInfo
from serve.worker.graphs import capture_sizes
from serve.worker.model_runner import ModelRunner, layer_shapes, make_runner
from serve.worker.request_rows import RequestRows
from serve.worker.startup.cache_identity import cache_identity, identity_digest
from serve.worker.startup.cache_size import GIB, CacheSize, longest_wanted, size_cache, token_budget
from serve.worker.startup.kv_precision import measured_scales
from serve.worker.startup.loading import LoadedModel, fitting, load_model, name_of
from serve.worker.startup.trial_steps import (
    largest_plan,
    measuring_plan,
    open_mask,
    warming_plans,
)

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
    block_file: BlockFile

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._config = config
        self._device = find_device(config.device)
        loaded = load_model(config, model_path, self._device)
        self._model, self._kernels = loaded.model, loaded.kernels
        self._dtype, self._cache_dtype = loaded.dtype, loaded.cache_dtype
        with fitting(self._device, "the largest step", _SMALLER_STEPS):
            self._scales = self._find_scales(loaded.checkpoint)
            self._compile_kernels()
            size = self._size_cache()
        with fitting(self._device, f"a KV pool of {size.num_blocks} blocks", _SMALLER_POOL):
            storage = self._make_storage(
                size.num_blocks, size.num_host_blocks, self._cache_dtype, self._scales
            )
            identity = self._identity(loaded)
            self.block_file = BlockFile(storage, identity, self._device.synchronize)
            self.runner = self._make_runner(
                storage, max_model_len=size.max_model_len, graph_sizes=self._graph_sizes()
            )
        self.info = WorkerInfo(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=self._model.vocab_size,
            max_model_len=size.max_model_len,
            max_num_batched_tokens=self._token_budget(size.max_model_len),
            device=self._device.kind.name,
            dtype=name_of(loaded.weights_dtype),
            attention_backend=self._kernels.name,
            block_bytes=self._block_bytes(),
            cache_dtype=name_of(self._cache_dtype),
            identity=identity_digest(identity),
            prompt_limits=tuple(self._model.prompt_limits),
            depth=self._device.kind.depth,
        )
        self._log_cache(size)

    def _identity(self, loaded: LoadedModel) -> dict[str, str]:
        kernels, is_own = self._kernels, self._model.is_native
        model = "our model" if is_own else f"another model, {kernels.attention.name} attention"
        is_invariant = is_own and kernels.is_thread_invariant
        return cache_identity(
            self._config,
            loaded.checkpoint,
            dtypes={
                "weights": loaded.weights_dtype,
                "activations": self._dtype,
                "the KV cache": self._cache_dtype,
            },
            kernels=f"{kernels.name} {kernels.build} for {model}",
            arithmetic=self._device.arithmetic(),
            num_threads=None if is_invariant else self._device.num_threads,
            scales=self._scales,
        )

    @property
    def device(self) -> Device:
        """Where all this lives."""
        return self._device

    def _find_scales(self, checkpoint: Checkpoint) -> list[Tensor] | None:
        """Of an eight-bit cache: the checkpoint's, or measured if that is asked for, or all 1."""
        if self._cache_dtype is self._dtype:
            return None
        heads = [layer.num_kv_heads for layer in self._model.cache_layers]
        scales, source = read_kv_scales(checkpoint, heads), "from the checkpoint"
        if scales is None and self._config.cache.calculate_kv_scales:
            scales, source = self._measure_scales(), "measured for every KV head"
        if scales is None:
            scales = [torch.ones(2, count) for count in heads]
            source = "1, because the checkpoint has none; --calculate-kv-scales measures them"
        logger.info("KV cache in e4m3, with scales %s", source)
        return [scale.to(self._device.torch_device) for scale in scales]

    def _measure_scales(self) -> list[Tensor]:
        """Run tokens from all over the vocabulary, and look at a cache in full precision."""
        plan = measuring_plan(
            self._model.vocab_size, self._model.max_position, self._config.cache.block_size
        )
        storage = self._make_storage(plan.num_scheduled_tokens, 0, self._dtype, None)
        runner = self._make_runner(storage, max_model_len=plan.num_scheduled_tokens)
        runner.execute(plan).wait()
        return measured_scales(storage.layers, self._kernels.attention)

    def _size_cache(self) -> CacheSize:
        longest = longest_wanted(self._config, self._model.max_position)
        return size_cache(
            self._config,
            block_bytes=self._block_bytes(),
            model_max_len=self._model.max_position,
            device_free_bytes=self._device.free_bytes(),
            host_total_bytes=host_memory.total_bytes(),
            measure_cache_bytes=lambda: self._device.cache_bytes(
                self._config.cache.gpu_memory_utilization, partial(self._run_largest_step, longest)
            ),
        )

    def _compile_kernels(self) -> None:
        """Launch each once, where they are compiled then, with all tokens in the null block."""
        if self._kernels.compiling is None:
            return
        longest = longest_wanted(self._config, self._model.max_position)
        storage = self._make_storage(0, 0, self._cache_dtype, self._scales)
        runner = self._make_runner(storage, max_model_len=longest)
        with self._kernels.compiling():
            for plan in warming_plans(longest, self._config.cache.block_size):
                runner.forward(plan).sample(open_mask(plan, self._model.vocab_size)).wait()

    def _token_budget(self, max_model_len: int) -> int:
        default = self._device.default_token_budget
        return token_budget(self._config.scheduler, default, max_model_len)

    def _run_largest_step(self, max_model_len: int) -> None:
        """Run the most expensive step that can come, with all its tokens in the null block."""
        storage = self._make_storage(0, 0, self._cache_dtype, self._scales)
        runner = self._make_runner(storage, max_model_len=max_model_len)
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
        if not self._model.can_be_recorded:
            logger.info("decode steps run without CUDA graphs, which this model does not allow")
            return []
        return capture_sizes(settings.cudagraph_capture_sizes, self._config.scheduler.max_num_seqs)

    def _make_storage(
        self,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        scales: Sequence[Tensor] | None,
    ) -> KVStorage:
        return KVStorage(
            self._layer_shapes(),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            dtype=dtype,
            allocate=self._device.allocate_zeros,
            copy_blocks=self._kernels.copy_blocks,
            allocate_host=self._device.allocate_host,
            scales=scales,
        )

    def _make_runner(
        self, storage: KVStorage, *, max_model_len: int, graph_sizes: Sequence[int] = ()
    ) -> ModelRunner:
        device, block_size = self._device, self._config.cache.block_size
        rows = RequestRows(
            self._config.scheduler.max_num_seqs,
            max_blocks=-(-max_model_len // block_size),
            vocab_size=self._model.vocab_size,
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

    def _block_bytes(self) -> int:
        return block_bytes(self._layer_shapes(), self._cache_dtype)

    def _log_cache(self, size: CacheSize) -> None:
        block_size = self._config.cache.block_size
        one_block = self._block_bytes()
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
