"""Whether a model can fit at all, worked out from its config before anything is built from it."""

from __future__ import annotations

import torch

from serve.errors import ConfigError
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.footprint import least_bytes
from serve.worker.device.device import Device
from serve.worker.device.kinds import GIB

_NAMED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "max_position_embeddings",
)


def check_memory(
    checkpoint: Checkpoint,
    device: Device,
    *,
    dtype: torch.dtype,
    impl: str,
    quantization: str | None,
) -> None:
    """Raises ConfigError, naming the file and its sizes, for a model that needs more memory than
    the device has left."""
    needed = least_bytes(
        checkpoint,
        dtype=dtype,
        compute_dtype=device.kind.compute_dtype(dtype),
        is_packed=device.kind.packs_weights,
        impl=impl,
        quantization=quantization,
    )
    free = device.free_bytes()
    if needed <= free:
        return
    text = checkpoint.hf_config.get_text_config()
    values = {name: getattr(text, name, None) for name in _NAMED}
    sizes = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    file = checkpoint.path / "config.json" if checkpoint.path.is_dir() else checkpoint.path
    raise ConfigError(
        f"{file}: the model does not fit on {device.describe()}: with {sizes} it takes "
        f"{needed / GIB:.1f} GiB. Serve a smaller one, or in a narrower --dtype."
    )
