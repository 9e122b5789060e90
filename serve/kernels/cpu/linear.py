"""Linear layers over packed weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.kernels.base import PackedLinear
from serve.kernels.cpu.library import Library, Linear, as_rows
from serve.kernels.cpu.panels import Panels, make_panels, pack_blocks, quantize_panels
from serve.kernels.stored import StoredMatrix, dequantize, stack

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_SLAB_BYTES = 32 << 20


class LinearPacker:
    """Packs weights for the C++ kernel, side by side in huge pages; a `PackLinearFn`."""

    def __init__(self, library: Library, quantization: str | None = None) -> None:
        """`quantization`: None keeps every bit of the weights, "int8" rounds them."""
        self._library = library
        self._rounds = quantization is not None
        self._slab = torch.empty(0, dtype=torch.uint8)  # the rest of the slab last made

    def __call__(self, parts: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
        if not self._rounds:
            blocks = pack_blocks(self._library, parts, self._take)
            if blocks is not None:
                return CpuLinear(self._library, blocks, bias)
        weight = dequantize(stack(parts))
        panels = quantize_panels(weight) if self._rounds else make_panels(weight)
        memory = self._take(panels.data.nbytes).view(panels.data.dtype).view(panels.data.shape)
        packed = Panels(panels.storage, panels.out_size, panels.in_size, memory.copy_(panels.data))
        return CpuLinear(self._library, packed, bias)

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

    def __init__(self, library: Library, panels: Panels, bias: Tensor | None) -> None:
        self.panels = panels
        self._library = library
        self._weights_at = panels.data.data_ptr()
        self._bias = None if bias is None else as_rows(bias.float())
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def described(self) -> Linear:
        """For C++ code that multiplies by itself; this object must outlive it."""
        panels = self.panels
        return Linear(
            panels.storage, panels.in_size, panels.out_size, self._weights_at, self._bias_at
        )

    def __call__(self, x: Tensor) -> Tensor:
        rows, panels = as_rows(x), self.panels
        result = rows.new_empty(*rows.shape[:-1], panels.out_size)
        self._library.linear(
            *(self._library.pool, panels.storage, rows.data_ptr()),
            *(rows.numel() // panels.in_size, panels.in_size, panels.out_size),
            *(self._weights_at, self._bias_at, result.data_ptr()),
        )
        return result
