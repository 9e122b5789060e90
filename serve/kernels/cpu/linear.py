"""Linear layers whose weights stay as narrow as they can be without losing a bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.base import PackedLinear
from serve.kernels.cpu.library import Library, as_rows

_PANEL = 16  # outputs side by side in memory: kLanes in simd.h
_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class LinearPacker:
    """Packs weights for the C++ kernel; a `PackLinearFn`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return CpuLinear(self._library, weight, bias)


class CpuLinear:
    """x @ weight.T + bias in fp32; every row's bits are its own, whatever rows it comes with."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._out, self._in = weight.shape
        narrow = narrowest(weight)
        self._storage = _STORAGE[narrow.dtype]
        self._panels = pack_panels(narrow)
        self._panels_at = self._panels.data_ptr()
        self._bias = None if bias is None else as_rows(bias.float())
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights: what one pass over them reads."""
        return self._panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        rows = as_rows(x)
        result = rows.new_empty(*rows.shape[:-1], self._out)
        self._library.linear(
            *(self._library.pool, self._storage, rows.data_ptr(), rows.numel() // self._in),
            *(self._in, self._out, self._panels_at, self._bias_at, result.data_ptr()),
        )
        return result


def narrowest(weight: Tensor) -> Tensor:
    """weight in a 16-bit type if every value survives the way there and back, else in fp32.

    A 16-bit checkpoint that was loaded as fp32 so gets back to 16 bits: half the memory traffic,
    the same numbers.
    """
    if weight.dtype in _STORAGE and weight.dtype is not torch.float32:
        return weight
    wide = weight.float()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return narrow
    return wide


def pack_panels(weight: Tensor) -> Tensor:
    """[out, in] → [ceil(out / 16), in, 16]; the last panel's missing outputs are zero."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _PANEL))
    panels = padded.view(-1, _PANEL, weight.shape[1]).transpose(1, 2)
    return panels.contiguous()
