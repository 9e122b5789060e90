"""What an engine can do before it is told its model."""

from __future__ import annotations

from serve.kernels.cpu.build import compile_ahead
from serve.worker.device import cuda_device


def begin_ahead() -> None:
    """Compile the CPU's kernels, if it will serve and has none yet, while the front fetches the
    model and reads its tokenizer."""
    if not cuda_device.is_available():
        compile_ahead()
