"""A CUDA GPU as a Device. Only here (and in tests of real GPUs) is torch.cuda touched."""

from __future__ import annotations

import gc
import logging
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.worker.device.device import CapturedWork, GraphRecorder, Mark, PendingCopy, Uploads
from serve.worker.device.kinds import CUDA, GIB
from serve.worker.device.uploads import StagedUploads

logger = logging.getLogger(__name__)


def is_available() -> bool:
    """Whether torch finds a CUDA device here."""
    return torch.cuda.is_available()


class _CudaCopy:
    """A copy into pinned memory, complete when its event has passed."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def wait(self) -> Tensor:
        self._copied.synchronize()
        return self._host


class _CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool: only one of them runs at a time.

    It has a stream of its own for all of them. cuBLAS keeps a workspace per stream: on torch's
    common capture stream, graphs of a closed engine would free it under those of the next, and a
    new stream for each warm-up would leave 32 MiB behind every time.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], Tensor]) -> tuple[CapturedWork, Tensor]:
        # A first run compiles kernels and creates libraries' workspaces, neither of which may
        # happen while recording.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        return graph, result

    def free_bytes(self) -> int:
        return self._device.free_bytes()


class _CudaMark:
    """A CUDA event; as CUDA has it, one that was never recorded is past."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """One NVIDIA GPU; work is queued on its current stream."""

    kind = CUDA

    def __init__(self) -> None:
        self.num_threads: int | None = None
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._properties = torch.cuda.get_device_properties(self.torch_device)
        _check_generation(self._properties)
        if (count := torch.cuda.device_count()) > 1:
            logger.info(
                "%d GPUs are here, and one server uses one: number %d. CUDA_VISIBLE_DEVICES=N "
                "chooses another; start a server on each to use them all",
                count,
                self.torch_device.index,
            )
        self.default_token_budget = CUDA.token_budget(self._properties.total_memory)

    def describe(self) -> str:
        free, total = self.free_bytes() / GIB, self._properties.total_memory / GIB
        return f"cuda ({self._properties.name}, {free:.1f} of {total:.1f} GiB free)"

    def arithmetic(self) -> str:
        cuda = torch.version.cuda
        return f"torch {torch.__version__} with CUDA {cuda} on {self._properties.name}"

    def resolve_dtype(self, wanted: str, checkpoint_dtype: torch.dtype) -> torch.dtype:
        named = {
            "auto": checkpoint_dtype,
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
        }
        return named[wanted]

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def cache_bytes(self, share: float | None, run_largest_step: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run_largest_step()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # What torch does not hold: the CUDA context, libraries' workspaces, other processes.
        outside = total - free - torch.cuda.memory_reserved(self.torch_device)
        return CUDA.pool_bytes(total - peak - outside, total, share)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_unused(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def graph_recorder(self) -> GraphRecorder:
        return _CudaGraphRecorder(self)

    def make_mark(self) -> Mark:
        return _CudaMark()

    def uploads(self, num_bytes: int) -> Uploads:
        return StagedUploads(self, num_bytes)

    def to_device(self, host: Tensor) -> Tensor:
        # torch keeps the pinned copy alive until the stream has read it.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> PendingCopy:
        return _CudaCopy(tensor)

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return _pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _check_generation(properties: Any) -> None:
    """Raises ConfigError for a GPU before Ampere: the kernels' loads and tiles are made for later
    ones, and bfloat16, in which most models come, is not to be had there."""
    if properties.major < 8:
        raise ConfigError(
            f"--device cuda: {properties.name} has compute capability {properties.major}."
            f"{properties.minor}, and 8.0 (Ampere) or newer is needed. Use --device cpu, or choose "
            "another GPU with CUDA_VISIBLE_DEVICES."
        )


def _pinned(num_bytes: int) -> Tensor:
    """Page-locked bytes, given back with the last tensor over them.

    Registered rather than allocated by torch, whose allocator of pinned memory takes the next power
    of two: 64 GiB for a swap space of 40. Raises ConfigError.
    """
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    address = memory.ctypes.data
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if failed:
        raise ConfigError(
            f"the driver cannot lock {num_bytes / GIB:.2f} GiB of host memory (CUDA error {failed})"
            ". Lower --swap-space, or use --preemption-mode recompute."
        )
    # While `memory` goes, and before the pages under it do.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)
