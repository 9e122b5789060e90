"""What must be equal for one run's bits to be another's: its KV blocks, and what a seed produces.

One record serves both: the prefix cache's file has it line by line, and `system_fingerprint` comes
from its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve import __version__
from serve.config import EngineConfig
from serve.models.weights.checkpoint import Checkpoint

_NUM_SAMPLES, _SAMPLE_BYTES = 48, 1 << 16

FORMAT = "2"
"""Of the file: changes when the same bytes come to mean something else."""


def cache_identity(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    dtypes: Mapping[str, torch.dtype],
    kernels: str,
    arithmetic: str,
    num_threads: int | None,
    scales: Sequence[Tensor] | None,
) -> dict[str, str]:
    """By name, so that what differs can be told. The shapes of layers are checked apart.

    `dtypes` are resolved, by what is kept in them; `kernels` and `arithmetic` name what computes,
    and the build of it; `num_threads` is None where bits do not depend on it.
    """
    model = config.model
    others = replace(model, model=None, revision=None, max_model_len="auto", dtype="auto")
    return {
        "format": FORMAT,
        "version": __version__,
        "model": _fingerprint(checkpoint),
        "quantization": str(model.quantization),
        "model settings": digest(repr(others).encode()),
        **{f"dtype of {what}": str(dtype) for what, dtype in dtypes.items()},
        "block size": str(config.cache.block_size),
        "kernels": kernels,
        "arithmetic": arithmetic,
        "threads": "any number" if num_threads is None else str(num_threads),
        "batch invariance": str(config.device.batch_invariant),
        "scales": digest(*(scale.cpu().numpy().tobytes() for scale in scales or ())),
    }


def identity_digest(identity: Mapping[str, str]) -> str:
    """The whole record in a few letters."""
    return digest(*(f"{name}={value}".encode() for name, value in identity.items()))


def digest(*parts: bytes) -> str:
    """Of these parts in this order, and of where each ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:32]


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of the config, and of each weight file's size and samples from all over it, or the whole of a
    small one: reading gigabytes again would cost more than the cache saves, and other weights
    differ nearly everywhere."""
    settings = checkpoint.hf_config.to_dict()
    settings.pop("_name_or_path", None)  # where it lies is not what it is
    parts = [repr(sorted(settings.items(), key=lambda item: str(item[0]))).encode()]
    for path in checkpoint.files:
        parts += [str(path.stat().st_size).encode(), *_samples(path)]
    return digest(*parts)


def _samples(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            return [file.read()]
        samples = []
        for number in range(_NUM_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            samples.append(file.read(_SAMPLE_BYTES))
    return samples
