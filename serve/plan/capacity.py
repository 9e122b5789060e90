"""What would fit: a model's memory on some machine, worked out as the engine would at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from serve.config import Count, DeviceConfig, EngineConfig
from serve.kernels.select import check_quantization
from serve.models.weights.checkpoint import Checkpoint, open_checkpoint
from serve.models.weights.footprint import Footprint, read_footprint
from serve.plan.settings import PlanConfig
from serve.worker.device import host_memory
from serve.worker.device.find_device import find_device
from serve.worker.device.kinds import CUDA, KINDS, DeviceKind
from serve.worker.startup.cache_size import CacheSize, longest_wanted, size_cache, token_budget
from serve.worker.startup.kv_precision import cache_dtype
from serve.worker.startup.loading import model_impl

_SAMPLING_COPIES = 4  # of the logits in fp32: as computed, edited, probabilities, sorted or masked
_UNKNOWN_HOST_BYTES = 1 << 60
_USUAL_LENGTHS = (1024, 4096, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests of one length run at once."""

    length: int
    num_blocks: int  # of each
    num_requests: int  # that the pool holds


@dataclass(frozen=True, slots=True)
class Capacity:
    """The plan: where memory goes, and what it is enough for. Sizes in bytes."""

    model: str
    model_type: str
    footprint: Footprint
    weight_bytes_by_dtype: dict[str, int]
    float32_kept: tuple[str, ...]  # see Footprint.kept
    device: str
    dtype: str
    memory_bytes: int
    usable_bytes: int
    step_bytes: int  # estimated
    context_bytes: int  # estimated
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheSize | None  # None: the model does not fit
    fits: tuple[Fit, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token in all layers."""
        return self.block_bytes // self.block_size

    @property
    def needed_bytes(self) -> int:
        """Memory that the weights and a single block need."""
        return self.footprint.weight_bytes + self.step_bytes + self.context_bytes + self.block_bytes


def plan_capacity(config: EngineConfig, options: PlanConfig, path: Path) -> Capacity:
    """Work it out for the model at `path`. Raises ConfigError for what the engine would refuse."""
    checkpoint = open_checkpoint(path, "dummy")
    device = _kind(config.device, options.memory)
    weights_dtype = _dtype(config.model.dtype, checkpoint.dtype, device)
    quantization, impl = config.model.quantization, model_impl(config)
    check_quantization(quantization, device.name, config.device.attention_backend)
    footprint = _footprint(checkpoint, device, weights_dtype, impl, quantization)
    by_dtype = {
        _name(dtype): _footprint(checkpoint, device, dtype, impl)
        for dtype in (torch.float32, torch.bfloat16)
    }
    dtype = device.compute_dtype(weights_dtype)
    memory = options.memory or find_device(config.device).free_bytes()
    longest = longest_wanted(config, footprint.max_position)
    budget = token_budget(config.scheduler, device.token_budget(memory), longest)
    step = _step_bytes(footprint, dtype, budget, config.scheduler.max_num_seqs)
    share = config.cache.gpu_memory_utilization
    usable = device.usable_bytes(memory, share)
    beside = footprint.weight_bytes + device.context_bytes
    block = footprint.block_bytes(config.cache.block_size, cache_dtype(config.cache, dtype))
    cache = None
    if usable - beside - step >= 2 * block:
        cache = size_cache(
            config,
            block_bytes=block,
            model_max_len=footprint.max_position,
            device_free_bytes=memory - beside,
            host_total_bytes=_UNKNOWN_HOST_BYTES if options.memory else host_memory.total_bytes(),
            measure_cache_bytes=lambda: device.pool_bytes(
                memory - beside - (step if device.tries_largest_step else 0), memory, share
            ),
        )
    return Capacity(
        model=config.model.model or path.name,
        model_type=str(checkpoint.hf_config.model_type),
        footprint=footprint,
        weight_bytes_by_dtype={name: each.weight_bytes for name, each in by_dtype.items()},
        float32_kept=by_dtype["float32"].kept,
        device=device.name,
        dtype=quantization or _name(weights_dtype),
        memory_bytes=memory,
        usable_bytes=usable,
        step_bytes=step,
        context_bytes=device.context_bytes,
        block_size=config.cache.block_size,
        block_bytes=block,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=budget,
        cache=cache,
        fits=_fits(cache, config.cache.block_size, options.lengths),
    )


def _kind(config: DeviceConfig, memory: Count | None) -> DeviceKind:
    """A size without a device means a GPU of that size."""
    if config.device != "auto":
        return KINDS[config.device]
    return CUDA if memory is not None else find_device(config).kind


def _dtype(wanted: str, stored: torch.dtype, device: DeviceKind) -> torch.dtype:
    """As Device.resolve_dtype, for a device that need not be here."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    return device.compute_dtype(stored)


def _step_bytes(footprint: Footprint, dtype: torch.dtype, budget: int, max_num_seqs: int) -> int:
    """What the largest step needs beside weights and cache: an estimate; the engine measures it."""
    residuals = 4 * footprint.hidden_size * dtype.itemsize
    rows = min(budget, max_num_seqs)
    logits = footprint.vocab_size * (dtype.itemsize + 4 * _SAMPLING_COPIES)
    return budget * (footprint.widest_bytes + residuals) + rows * logits


def _footprint(
    checkpoint: Checkpoint,
    device: DeviceKind,
    dtype: torch.dtype,
    impl: str,
    quantization: str | None = None,
) -> Footprint:
    return read_footprint(
        checkpoint,
        dtype=dtype,
        compute_dtype=device.compute_dtype(dtype),
        is_packed=device.packs_weights,
        impl=impl,
        quantization=quantization,
    )


def _fits(cache: CacheSize | None, block_size: int, lengths: tuple[Count, ...]) -> tuple[Fit, ...]:
    if cache is None:
        return ()
    longest = cache.max_model_len
    usual = (*(n for n in _USUAL_LENGTHS if n < longest), longest)
    wanted: Sequence[int] = lengths or usual
    blocks = [-(-length // block_size) for length in wanted]
    return tuple(
        Fit(int(length), num, cache.num_blocks // num if length <= longest else 0)
        for length, num in zip(wanted, blocks, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
