"""Triton's interpreter, made to compute what a GPU computes, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
BITS = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


@contextmanager
def gpu_arithmetic() -> Iterator[None]:
    """Round to bfloat16 and e4m3 as GPUs do, multiply bfloat16 matrices, let numbers overflow.

    Left alone, the interpreter cuts both off instead of rounding, and its `tl.dot` multiplies
    the bit patterns as integers. Widening to fp32 loses nothing: a GPU's products are exact too.
    Triton 3.6 needs help, besides, to use its scalars as loop bounds with numpy 2.4.
    """
    convert_float = interpreter._convert_float
    create_dot = interpreter.InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(data)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if tl.float8e4nv in (source, target):
            numbers = torch.from_numpy(np.array(data)).view(TORCH_DTYPES[source])
            return numbers.to(TORCH_DTYPES[target]).view(BITS[target.primitive_bitwidth]).numpy()
        return convert_float(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand
            for operand in (a, b)
        )
        return create_dot(self, a, b, *rest)

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter, "_convert_float", convert)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
        yield


@contextmanager
def exact_dots() -> Iterator[None]:
    """Sum each `tl.dot` in fp64 and round once.

    numpy rounds a row of an fp32 product by its place in the matrix, a GPU does not; with this, the
    order in which a kernel adds its tiles is all that can make two results differ.
    """

    def dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return interpreter.TensorHandle(
            product.astype(total.data.dtype) + total.data, total.dtype.scalar
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield
