"""The machine's processors and memory as a Device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve.worker.device import host_memory
from serve.worker.device.device import Mark, PendingCopy, Uploads
from serve.worker.device.kinds import CPU, GIB
from serve.worker.device.uploads import DirectUploads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done:
    """A copy that needed no time."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class _Past:
    """A mark where nothing is ever under way."""

    def set(self) -> None:
        pass

    def wait(self) -> None:
        pass


class CpuDevice:
    """The machine's processors and memory. Work is done when a call returns."""

    kind = CPU
    torch_device = torch.device("cpu")
    default_token_budget = CPU.token_budget(0)

    def __init__(self, num_threads: int | None = None) -> None:
        """Also sets torch's thread count for this process.

        Torch's threads load and repack weights, and run models of transformers. In steps of our own
        models they sleep while the kernels' pool works: with one or with two of them, prefill and
        decode took the same time on two cores.
        """
        threads = num_threads or host_memory.usable_cores()
        torch.set_num_threads(threads)
        self.num_threads: int | None = threads

    def describe(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        isa = torch.backends.cpu.get_cpu_capability()
        return f"cpu ({threads}, {isa}, {self.free_bytes() / GIB:.1f} GiB of memory available)"

    def arithmetic(self) -> str:
        isa = torch.backends.cpu.get_cpu_capability()
        return f"torch {torch.__version__} on cpu, {isa}"

    def resolve_dtype(self, wanted: str, checkpoint_dtype: torch.dtype) -> torch.dtype:
        if wanted == "auto" and checkpoint_dtype is not torch.float32:
            stored = str(checkpoint_dtype).removeprefix("torch.")
            logger.info("the checkpoint is %s; a CPU serves it in float32", stored)
        dtype: torch.dtype = torch.float32 if wanted == "auto" else getattr(torch, wanted)
        return dtype

    def free_bytes(self) -> int:
        return host_memory.available_bytes()

    def cache_bytes(self, share: float | None, run_largest_step: Callable[[], None]) -> int:
        return CPU.pool_bytes(self.free_bytes(), host_memory.total_bytes(), share)

    def synchronize(self) -> None:
        pass  # nothing is ever under way

    def release_unused(self) -> None:
        pass  # the allocator gives back by itself

    def graph_recorder(self) -> None:
        return None

    def make_mark(self) -> Mark:
        return _Past()

    def uploads(self, num_bytes: int) -> Uploads:
        return DirectUploads()

    def to_device(self, host: Tensor) -> Tensor:
        return host

    def to_host(self, tensor: Tensor) -> PendingCopy:
        return _Done(tensor.clone())  # the next step may write into the same memory

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy leaves zeroing to the kernel, page by page at first use, and asks for huge pages: a
        # pool of gigabytes costs neither time at start nor memory before it is needed.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)
