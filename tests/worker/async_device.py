"""A device whose results cannot be seen before they are waited for, on a CPU."""

from __future__ import annotations

from torch import Tensor

from serve.worker.device import CpuDevice


class LateCopy:
    """Takes a tensor's contents when made, as a copy on the one ordered stream does, and gives them
    only to who waits: steps launched in between overwrite the tensor, not the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._contents = tensor.clone()

    def wait(self) -> Tensor:
        return self._contents


class AsyncDevice(CpuDevice):
    """Copies in both directions, so that host and device never share memory."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)

    def to_device(self, host: Tensor) -> Tensor:
        return host.clone()

    def to_host(self, tensor: Tensor) -> LateCopy:
        return LateCopy(tensor)
