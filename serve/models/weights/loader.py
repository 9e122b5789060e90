"""Copies a checkpoint's tensors into a model's parameters, and accounts for every one of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from serve.errors import ConfigError
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.kv_scales import is_kv_scale

logger = logging.getLogger(__name__)

_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store it; the config says the same


def load_parameters(targets: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Fill each target with the checkpoint's tensor of its name, converting the dtype.

    Raises ConfigError naming the file and tensor when one is missing, has another shape or no
    floating-point numbers, or has no target.
    """
    started = time.monotonic()
    missing = set(targets)
    with _Progress(sum(target.numel() for target in targets.values())) as progress:
        for file, name, tensor in _tensors(checkpoint):
            target = targets.get(name)
            if target is None:
                if not (name.endswith(_COMPUTED) or is_kv_scale(name)):
                    raise ConfigError(
                        f"{file}: tensor {name} has no place in this {_family(checkpoint)} model; "
                        "config.json and weights do not belong together"
                    )
                continue
            if tensor.shape != target.shape:
                raise ConfigError(
                    f"{file}: tensor {name} has shape {list(tensor.shape)}, but the config asks "
                    f"for {list(target.shape)}; config.json and weights do not belong together"
                )
            if not tensor.is_floating_point():
                raise ConfigError(
                    f"{file}: tensor {name} holds {str(tensor.dtype).removeprefix('torch.')} "
                    "numbers, not floating point ones; quantized checkpoints cannot be served, use "
                    "the model's unquantized weights or a .gguf file"
                )
            target.copy_(tensor)
            if not all(bound.isfinite() for bound in target.aminmax()):
                raise ConfigError(
                    f"{file}: tensor {name} has numbers that are not finite in "
                    f"{str(target.dtype).removeprefix('torch.')}; download the file again, or "
                    "choose a --dtype with a larger range"
                )
            missing.discard(name)
            progress.advance(target.numel())
    if missing:
        raise ConfigError(f"{checkpoint.path}: {_describe(missing)}; download the model again")
    logger.info("loaded %s in %.1f s", checkpoint.path, time.monotonic() - started)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[Path, str, Tensor]]:
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors_of(file):
            yield file, name, tensor


def _family(checkpoint: Checkpoint) -> str:
    return str(checkpoint.hf_config.model_type)


def _describe(missing: set[str]) -> str:
    first, *others = sorted(missing)
    if not others:
        return f"tensor {first} is missing from the weights"
    return f"tensor {first} and {len(others)} more are missing from the weights"


class _Progress:
    """A bar on a terminal, nothing elsewhere: the log line at the end is enough for a file."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("loading weights"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)
