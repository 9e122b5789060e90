"""What must be equal for one run's KV blocks to be another's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from serve.config import EngineConfig
from serve.models.checkpoint import Checkpoint

_SAMPLE_BYTES = 1 << 20

FORMAT = "1"
"""Of the file: changes when the same bytes come to mean something else."""


def cache_identity(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    kernels: str,
    scales: Sequence[Tensor] | None,
) -> dict[str, str]:
    """By name, so that what differs can be told. The shapes of layers are checked apart."""
    settings = replace(config.model, model=None, revision=None, max_model_len="auto")
    return {
        "format": FORMAT,
        "model": _fingerprint(checkpoint),
        "model settings": _digest(repr(settings).encode()),
        "dtype": dtype,
        "block size": str(config.cache.block_size),
        "attention kernels": kernels,
        "scales": _digest(*(scale.cpu().numpy().tobytes() for scale in scales or ())),
    }


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Of the config, and of each weight file's size, beginning, middle and end: reading gigabytes
    again would cost more than the cache saves, and other weights differ nearly everywhere."""
    parts = [checkpoint.hf_config.to_json_string(use_diff=False).encode()]
    for path in checkpoint.files:
        parts += [str(path.stat().st_size).encode(), *_samples(path)]
    return _digest(*parts)


def _samples(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        samples = []
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            samples.append(file.read(_SAMPLE_BYTES))
    return samples


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]
