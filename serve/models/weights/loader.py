"""Copies a checkpoint's tensors into a model's parameters, and accounts for every one of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.stored import Blocks, Dense, StoredMatrix, all_finite, dequantize
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.kv_scales import is_kv_scale
from serve.models.weights.parameters import Target
from serve.progress import StartBar

logger = logging.getLogger(__name__)

_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store it; the config says the same


def load_parameters(targets: Mapping[str, Target], checkpoint: Checkpoint) -> None:
    """Fill each target with the checkpoint's tensor of its name: matrices as they are stored, and
    of a shard its part of them; others with their values, converted.

    Raises ConfigError naming the file and tensor when one is missing, has another shape or no
    floating-point numbers, or has no target.
    """
    started = time.monotonic()
    missing = set(targets)
    with StartBar("loading weights", sum(t.numel() for t in targets.values())) as progress:
        for file, name, stored in _tensors(checkpoint):
            target = targets.get(name)
            if target is None:
                if not (name.endswith(_COMPUTED) or is_kv_scale(name)):
                    raise ConfigError(
                        f"{file}: tensor {name} has no place in this {_family(checkpoint)} model; "
                        "config.json and weights do not belong together"
                    )
                continue
            matrix = Dense(stored) if isinstance(stored, Tensor) else stored
            _check_shape(file, name, stored.shape, target)
            _check_numbers(file, name, matrix, target.dtype)
            if isinstance(target, Tensor):
                target.copy_(dequantize(matrix))
            else:
                target.fill(matrix)
            missing.discard(name)
            progress.advance(target.numel())
    if missing:
        raise ConfigError(f"{checkpoint.path}: {_describe(missing)}; download the model again")
    logger.info("loaded %s in %.1f s", checkpoint.path, time.monotonic() - started)


def _check_shape(file: Path, name: str, shape: Sequence[int], target: Target) -> None:
    wanted = target.shape if isinstance(target, Tensor) else target.whole
    if tuple(shape) != tuple(wanted):
        raise ConfigError(
            f"{file}: tensor {name} has shape {list(shape)}, but the config asks "
            f"for {list(wanted)}; config.json and weights do not belong together"
        )


def _check_numbers(file: Path, name: str, matrix: StoredMatrix, dtype: torch.dtype) -> None:
    if isinstance(matrix, Dense) and not matrix.weight.is_floating_point():
        raise ConfigError(
            f"{file}: tensor {name} holds {matrix.form} "
            "numbers, not floating point ones; quantized checkpoints cannot be served, use "
            "the model's unquantized weights or a .gguf file"
        )
    if not all_finite(matrix, dtype):
        raise ConfigError(
            f"{file}: tensor {name} has numbers that are not finite in "
            f"{str(dtype).removeprefix('torch.')}; download the file again, or "
            "choose a --dtype with a larger range"
        )


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[Path, str, Tensor | Blocks]]:
    for file in checkpoint.files:
        for name, tensor in checkpoint.stored_in(file):
            yield file, name, tensor


def _family(checkpoint: Checkpoint) -> str:
    return str(checkpoint.hf_config.model_type)


def _describe(missing: set[str]) -> str:
    first, *others = sorted(missing)
    if not others:
        return f"tensor {first} is missing from the weights"
    return f"tensor {first} and {len(others)} more are missing from the weights"
