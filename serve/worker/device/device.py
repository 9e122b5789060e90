"""Device: what differs between serving on a CPU and on a CUDA GPU, behind one protocol.

Memory, number formats, and how tensors move between host and device. Here are the protocols;
torch.cuda is touched in cuda_device.py only, and everything else asks the Device it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from serve.worker.device.kinds import DeviceKind

Array = npt.NDArray[Any]


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


class Uploads(Protocol):
    """Host arrays → device tensors that live as long as the step. Used by one thread."""

    def begin(self) -> None:
        """A new step: the tensors of the last one may be overwritten by what is launched now."""

    def send(self, *arrays: Array) -> list[Tensor]:
        """The arrays' contents on the device, in their dtypes and shapes. Do not change the arrays
        afterwards."""


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

    kind: DeviceKind
    torch_device: torch.device
    num_threads: int | None  # compute threads; None where the device has no such notion
    default_token_budget: int  # tokens per step when the user names no number

    def describe(self) -> str:
        """The device for a log line."""

    def arithmetic(self) -> str:
        """What the bits of torch's operations depend on here."""

    def resolve_dtype(self, wanted: str, checkpoint_dtype: torch.dtype) -> torch.dtype:
        """The weights' dtype for a `--dtype` value. Raises ConfigError for one that cannot work."""

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
        """Give back memory that is kept for later but holds nothing now, or nothing but garbage."""

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
