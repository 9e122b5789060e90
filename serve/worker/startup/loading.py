"""From a checkpoint to a model on its device: what is chosen on the way, with reasons for the log.

Raises ConfigError for a model, a setting or a machine that cannot work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from serve.config import EngineConfig
from serve.errors import ConfigError, OutOfMemory
from serve.kernels.base import Kernels
from serve.kernels.select import select_kernels
from serve.models.base import CausalModel
from serve.models.registry import build_model, head_dims
from serve.models.weights.checkpoint import Checkpoint, open_checkpoint
from serve.models.weights.footprint import read_footprint
from serve.worker.device.device import Device
from serve.worker.device.kinds import GIB
from serve.worker.startup.kv_precision import cache_dtype
from serve.worker.startup.memory_check import check_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, the kernels it runs on, and the number formats that were resolved for them."""

    checkpoint: Checkpoint
    model: CausalModel
    kernels: Kernels
    weights_dtype: torch.dtype
    dtype: torch.dtype  # of activations, and of keys and values as they are computed
    cache_dtype: torch.dtype


def load_model(config: EngineConfig, model_path: Path, device: Device) -> LoadedModel:
    """Choose kernels and formats, check that it fits, and load it."""
    checkpoint, impl = open_checkpoint(model_path, config.model.load_format), model_impl(config)
    weights_dtype = device.resolve_dtype(config.model.dtype, checkpoint.dtype)
    dtype = device.kind.compute_dtype(weights_dtype)
    kv_dtype = cache_dtype(config.cache, dtype)
    kernels, why = select_kernels(
        device.kind.name,
        config.device.attention_backend,
        dtype=dtype,
        head_dims=head_dims(checkpoint),
        block_size=config.cache.block_size,
        num_threads=device.num_threads,
        batch_invariant=config.device.batch_invariant,
        cache_dtype=kv_dtype,
        quantization=config.model.quantization,
    )
    logger.info("model %s, in %s on %s", model_path.name, name_of(weights_dtype), device.describe())
    if dtype is not weights_dtype:
        weights, others = name_of(weights_dtype), name_of(dtype)
        logger.info("only weights are in %s; all else is in %s", weights, others)
    logger.info("attention: %s", why)
    check_memory(
        checkpoint, device, dtype=weights_dtype, impl=impl, quantization=config.model.quantization
    )
    with fitting(device, "the model", "Serve a smaller one, or in a narrower --dtype."):
        model = build_model(
            checkpoint,
            kernels=kernels,
            dtype=weights_dtype,
            compute_dtype=dtype,
            device=device.torch_device,
            impl=impl,
            seed=config.model.seed,
        )
    kernels = replace(kernels, attention=model.attention)
    loaded = LoadedModel(checkpoint, model, kernels, weights_dtype, dtype, kv_dtype)
    if model.is_native:  # transformers' models would be measured by building them again
        _log_weights(loaded, device, config.model.quantization)
    return loaded


def model_impl(config: EngineConfig) -> str:
    """Which implementation of the model to ask for: transformers' multiplies by torch, in torch's
    formats and with rounding that depends on the batch. Raises ConfigError."""
    wanted = config.model.model_impl
    flags = {
        "--batch-invariant": config.device.batch_invariant,
        f"--quantization {config.model.quantization}": config.model.quantization is not None,
    }
    only_ours = [flag for flag, given in flags.items() if given]
    if only_ours and wanted == "transformers":
        raise ConfigError(
            f"{only_ours[0]}: --model-impl transformers multiplies matrices by torch, in torch's "
            "formats and with rounding that depends on the batch; use --model-impl native."
        )
    return "native" if only_ours else wanted


@contextmanager
def fitting(device: Device, what: str, advice: str) -> Iterator[None]:
    """Running out of memory while starting is a ConfigError with the figures and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        if not _is_lack_of_memory(error):
            raise
        raise ConfigError(f"{what} does not fit on {device.describe()}. {advice}") from error


def name_of(dtype: torch.dtype) -> str:
    """As users write it: float16."""
    return str(dtype).removeprefix("torch.")


def _is_lack_of_memory(error: Exception) -> bool:
    """torch has a class for a GPU's memory only; its allocator for CPUs says it in words."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory)
    return named or "can't allocate memory" in str(error)


def _log_weights(loaded: LoadedModel, device: Device, quantization: str | None) -> None:
    footprint = read_footprint(
        loaded.checkpoint,
        dtype=loaded.weights_dtype,
        compute_dtype=loaded.dtype,
        is_packed=device.kind.packs_weights,
        impl="native",
        quantization=quantization,
    )
    logger.info(
        "weights: %.0f million parameters in %.2f GiB%s",
        footprint.num_parameters / 1e6,
        footprint.weight_bytes / GIB,
        f"; linear layers quantized to {quantization}" if quantization else "",
    )
    if footprint.kept:
        logger.info(
            "matrices are kept in %s, like in the file, which loses nothing",
            " and ".join(footprint.kept),
        )
    if footprint.widened:
        logger.info(
            "values from %s blocks are kept in 32 bits, which loses nothing; "
            "--quantization int8 would take 8",
            " and ".join(footprint.widened),
        )
