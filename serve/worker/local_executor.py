"""LocalExecutor: one worker in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve.config import EngineConfig
from serve.scheduler.output import SchedulerOutput
from serve.worker.executor import Launch, WorkerInfo
from serve.worker.worker import Worker


class LocalExecutor:
    """Executor, and BlockArchive, over a Worker that it makes in `start` and drops in `close`."""

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._config = config
        self._model_path = model_path
        self._worker: Worker | None = None

    def start(self) -> WorkerInfo:
        """Load the model and allocate the cache. Raises ConfigError."""
        assert self._worker is None, "started twice"
        self._worker = Worker(self._config, self._model_path)
        return self._worker.info

    def forward(self, plan: SchedulerOutput) -> Launch:
        """Launch a step's forward pass; on a CPU it has run when this returns."""
        assert self._worker is not None, "not started"
        return self._worker.runner.forward(plan)

    def write_blocks(self, path: Path, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Replace a file by these blocks; its size in bytes. Raises OSError."""
        assert self._worker is not None, "not started"
        return self._worker.block_file.write(path, hashes, block_ids)

    def read_hashes(self, path: Path) -> list[bytes]:
        """Of the blocks in a file, most wanted first. Raises BlocksUnusable."""
        assert self._worker is not None, "not started"
        return self._worker.block_file.read_hashes(path)

    def read_blocks(self, path: Path, block_ids: Sequence[int]) -> None:
        """Fill blocks with the first ones of a file. Raises BlocksUnusable."""
        assert self._worker is not None, "not started"
        self._worker.block_file.read(path, block_ids)

    def close(self) -> None:
        """Drop the model and the cache, and give their memory back."""
        if self._worker is not None:
            device = self._worker.device
            self._worker = None
            device.release_unused()
