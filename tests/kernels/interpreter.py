"""Repairs of Triton's interpreter, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


@contextmanager
def widened_dots() -> Iterator[None]:
    """Make `tl.dot` right for bfloat16, whose bit patterns the interpreter multiplies as integers.

    Widening to fp32 loses nothing: a GPU multiplies bfloat16 exactly and sums in fp32 too.
    """
    narrow_dot = InterpreterBuilder.create_dot

    def create_dot(self: object, a: object, b: object, *rest: object) -> object:
        wide = [
            self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand
            for operand in (a, b)
        ]
        return narrow_dot(self, *wide, *rest)

    InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = narrow_dot
