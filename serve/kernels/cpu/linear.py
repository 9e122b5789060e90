"""Linear layers whose weights stay as narrow as they can be without losing a bit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.base import PackedLinear
from serve.kernels.cpu.library import Library, as_rows

_PANEL = 16  # outputs side by side in memory: kLanes in simd.h
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_SLAB_BYTES = 32 << 20
_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class LinearPacker:
    """Packs weights for the C++ kernel, side by side in huge pages; a `PackLinearFn`."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._slab = torch.empty(0, dtype=torch.uint8)  # the rest of the slab last made

    def __call__(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        panels = panels_of(narrowest(weight))
        packed = self._take(panels.nbytes).view(panels.dtype).view(panels.shape).copy_(panels)
        return CpuLinear(self._library, packed, weight.shape[0], bias)

    def _take(self, num_bytes: int) -> Tensor:
        """Memory that lives as long as the returned tensor (or a neighbour in its slab)."""
        if self._slab.nbytes < num_bytes:
            size = max(_SLAB_BYTES, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
            memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
            self._slab = memory[-memory.data_ptr() % _HUGE_PAGE :][:size]
            self._library.advise_huge_pages(self._slab.data_ptr(), size)
        taken = self._slab[:num_bytes]
        self._slab = self._slab[-(-num_bytes // _PAGE) * _PAGE :]
        return taken


class CpuLinear:
    """x @ weight.T + bias in fp32; every row's bits are its own, whatever rows it comes with."""

    def __init__(self, library: Library, panels: Tensor, out: int, bias: Tensor | None) -> None:
        self._library = library
        self._panels = panels
        self._out, self._in = out, panels.shape[1]
        self._storage = _STORAGE[panels.dtype]
        self._panels_at = panels.data_ptr()
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


def panels_of(weight: Tensor) -> Tensor:
    """[out, in] → [ceil(out / 16), in, 16], a view; the last panel's missing outputs are zero."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _PANEL))
    return padded.view(-1, _PANEL, weight.shape[1]).transpose(1, 2)
