"""The way of a step's numbers (token ids, positions, block tables, wishes) to the device.

A step needs a dozen small arrays there. Sent one by one, each would cost a piece of pinned memory,
a piece of device memory and a copy; here each call is one copy, through memory that is allocated
once. On the device every step uses the same area, since its work happens in the order it was given;
in host memory a few slots take turns, since a copy may be read long after it was ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from serve.worker.device.device import Array, Device

_ALIGNMENT = 16
_NUM_SLOTS = 3  # steps that may be under way at once, and one that is being built


class DirectUploads:
    """Uploads where the device reads host memory."""

    def begin(self) -> None:
        pass

    def send(self, *arrays: Array) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]


class _Slot:
    """A piece of pinned host memory, free again when its mark is past."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.tensor = device.allocate_host((num_bytes,), torch.uint8)
        self.bytes = self.tensor.numpy()
        self.mark = device.make_mark()


class StagedUploads:
    """Uploads through pinned memory. What does not fit is sent by itself."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._area = device.allocate_zeros((num_bytes,), torch.uint8)
        self._slots = cycle([_Slot(device, num_bytes) for _ in range(_NUM_SLOTS)])
        self._slot = next(self._slots)
        self._used = 0

    def begin(self) -> None:
        self._slot.mark.set()
        self._slot = next(self._slots)
        self._slot.mark.wait()
        self._used = 0

    def send(self, *arrays: Array) -> list[Tensor]:
        starts = self._place(arrays)
        if starts is None:
            return [self._device.to_device(torch.from_numpy(array)) for array in arrays]
        first, end = starts[0], self._used
        sent = []
        for array, start in zip(arrays, starts, strict=True):
            place = slice(start, start + array.nbytes)
            self._slot.bytes[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            like = torch.from_numpy(array)
            sent.append(self._area[place].view(like.dtype).view(like.shape))
        self._area[first:end].copy_(self._slot.tensor[first:end], non_blocking=True)
        return sent

    def _place(self, arrays: Sequence[Array]) -> list[int] | None:
        """Where each array begins; None if they do not all fit."""
        starts, end = [], self._used
        for array in arrays:
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + array.nbytes
        if end > len(self._slot.bytes):
            return None
        self._used = end
        return starts
