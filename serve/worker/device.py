"""Device: what differs between serving on a CPU and on a CUDA GPU, behind one protocol.

Memory, number formats, and how tensors move between host and device. Here are the protocol and the
CPU; torch.cuda is touched in cuda_device.py only, and everything else asks the Device it was given.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from serve.config import DeviceConfig
from serve.errors import ConfigError
from serve.worker import host_memory
from serve.worker.uploads import SharedMemory, Uploads

logger = logging.getLogger(__name__)

GIB = 2**30

# Running streams wait for a step's prompt tokens: half a second for these on two cores with a
# 135M model, four for 2048. They also stay in the caches, which is worth 5 % of a prompt's time.
CPU_TOKEN_BUDGET = 256
_SMALL_TOKEN_BUDGET = 2048
_LARGE_TOKEN_BUDGET = 8192
_LARGE_DEVICE_BYTES = 70 * GIB

_CPU_POOL_SHARE = 0.25
_CPU_POOL_MOST_BYTES = 4 * GIB


def gpu_token_budget(device_bytes: int) -> int:
    """Tokens per step on a GPU of this size when the user names no number."""
    return _LARGE_TOKEN_BUDGET if device_bytes >= _LARGE_DEVICE_BYTES else _SMALL_TOKEN_BUDGET


def gpu_share(asked: float | None) -> float:
    """The share of a GPU's memory that may be in use."""
    return 0.9 if asked is None else asked


def cpu_pool_bytes(free_bytes: int, total_bytes: int, share: float | None) -> int:
    """The KV pool on a CPU that has so much memory left beside the model: what keeps memory in use
    at `share` of all; without a share a modest part, as memory here also belongs to others."""
    if share is not None:
        return int(total_bytes * share) - (total_bytes - free_bytes)
    return min(int(free_bytes * _CPU_POOL_SHARE), _CPU_POOL_MOST_BYTES)


class PendingCopy(Protocol):
    """A copy to the host that may still be under way."""

    def wait(self) -> Tensor:
        """The tensor in host memory, once it is complete."""


class Mark(Protocol):
    """A place in the order of a device's work."""

    def set(self) -> None:
        """Here: after all work given so far, and no longer where it was before."""

    def wait(self) -> None:
        """Wait until the device has come past the mark; at once if it was never set."""


class CapturedWork(Protocol):
    """Device work that was recorded and can be done again."""

    def replay(self) -> None:
        """Do it on what its inputs hold now; its result is in the same memory as before."""


class GraphRecorder(Protocol):
    """Records device work. What is recorded may read nothing on the host that varies."""

    def capture(self, work: Callable[[], Tensor]) -> tuple[CapturedWork, Tensor]:
        """Record `work`; also the tensor it returns, which a replay fills."""

    def free_bytes(self) -> int:
        """Memory still available on the device."""


class Device(Protocol):
    """Where the model runs. All work on it happens in the order it was given."""

    name: str  # "cpu" or "cuda", the kernel selection's device_type
    torch_device: torch.device
    num_threads: int | None  # compute threads; None where the device has no such notion
    default_token_budget: int  # tokens per step when the user names no number

    def describe(self) -> str:
        """The device for a log line."""

    def arithmetic(self) -> str:
        """What the bits of torch's operations depend on here."""

    def resolve_dtype(self, wanted: str, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The weights' dtype for a `--dtype` value. Raises ConfigError for one that cannot work."""

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """What activations, keys and values are in, for weights of this dtype."""

    def free_bytes(self) -> int:
        """Memory still available here."""

    def cache_bytes(self, share: float | None, run_largest_step: Callable[[], None]) -> int:
        """Memory for the KV pool when no size was asked for; 0 or less when nothing is left.

        `share` of the device's memory may be in use in all, if it was asked for;
        `run_largest_step` shows what a step needs.
        """

    def synchronize(self) -> None:
        """Wait until all work given so far is done."""

    def release_unused(self) -> None:
        """Give back memory that is kept for later but holds nothing now."""

    def graph_recorder(self) -> GraphRecorder | None:
        """Records graphs of device work; None where launching work costs nothing to speak of."""

    def make_mark(self) -> Mark:
        """A mark, not set yet."""

    def uploads(self, num_bytes: int) -> Uploads:
        """A way for the numbers of each step to the device, for so many bytes a step."""

    def to_device(self, host: Tensor) -> Tensor:
        """A host tensor's contents on the device; it may be the same memory. Do not change `host`
        afterwards."""

    def to_host(self, tensor: Tensor) -> PendingCopy:
        """Begin to copy a device tensor's present contents to the host."""

    def allocate_zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Device memory that reads as zeros."""

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory, not initialized, that copies to and from the device at full speed."""


def find_device(config: DeviceConfig) -> Device:
    """The device that `--device` names; auto prefers CUDA. Raises ConfigError."""
    from serve.worker import cuda_device  # which needs the protocols of this module

    has_cuda = cuda_device.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: this machine has no CUDA device that torch can use. "
            "Use --device cpu, or install a CUDA build of torch and the NVIDIA driver."
        )
    if config.device == "cpu" or not has_cuda:
        return CpuDevice(config.cpu_threads)
    return cuda_device.CudaDevice()


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

    name = "cpu"
    torch_device = torch.device("cpu")
    default_token_budget = CPU_TOKEN_BUDGET

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

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        # 16-bit arithmetic is emulated on most CPUs: slower than fp32, and it rounds every step.
        return torch.float32

    def free_bytes(self) -> int:
        return host_memory.available_bytes()

    def cache_bytes(self, share: float | None, run_largest_step: Callable[[], None]) -> int:
        return cpu_pool_bytes(self.free_bytes(), host_memory.total_bytes(), share)

    def synchronize(self) -> None:
        pass  # nothing is ever under way

    def release_unused(self) -> None:
        pass  # the allocator gives back by itself

    def graph_recorder(self) -> None:
        return None

    def make_mark(self) -> Mark:
        return _Past()

    def uploads(self, num_bytes: int) -> Uploads:
        return SharedMemory()

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
