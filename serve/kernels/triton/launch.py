"""Launches with little Python in them.

To find the compiled variant a call needs, Triton looks at every argument of every call, which takes
longer than the launch itself: some 25 us on one EPYC core, at five to seven launches a layer. Here
what may choose a variant is told apart from what must not, and a variant is looked up by the former
alone (benchmarks/host_step.py has a step's time with both).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Grid = tuple[int, int, int]

_ALIGNMENT = 16


def cdiv(dividend: int, divisor: int) -> int:
    """Rounded up. Triton's own takes some microseconds on the host."""
    return -(-dividend // divisor)


class Launcher:
    """One jitted kernel, for the GPU of this process.

    Its parameters must be, in this order: tensors; strides, which are few for a model; numbers that
    vary, all of them in `do_not_specialize`; constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        numbers: tuple[float, ...],
        constants: tuple[object, ...],
        *,
        num_warps: int,
        num_stages: int | None = None,
    ) -> None:
        """Launch; the first call of a variant compiles it."""
        dtypes = [tensor.dtype for tensor in tensors]
        key = (strides, constants, num_warps, num_stages, *dtypes)
        variant = self._variants.get(key)
        arguments = (*tensors, *strides, *numbers, *constants)
        if variant is not None and _aligned(tensors):
            variant[grid](*arguments)
            return
        first = len(tensors) + len(strides)
        for parameter in getattr(self._kernel, "params", ())[first : first + len(numbers)]:
            assert parameter.do_not_specialize, f"{parameter.name} would choose a variant"
        options = {} if num_stages is None else {"num_stages": num_stages}
        variant = self._kernel[grid](*arguments, num_warps=num_warps, **options)
        if _aligned(tensors):
            self._variants[key] = variant  # None where Triton interprets, which keeps none


def _aligned(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all start where variants expect it, as all do but odd slices."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return not addresses % _ALIGNMENT
