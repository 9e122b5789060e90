"""Matrices as a checkpoint stores them, on their way to the kernels that pack them.

They travel as they lie in the file, most often in the file's own pages: only who packs a matrix
knows which form it is multiplied in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_NEIGHBOURS: Final = 32  # weights along `in` that share a block, in the kinds that kernels may keep
BLOCK_BYTES: Final = {"Q4_0": 2 + 16, "Q4_1": 4 + 16, "Q8_0": 2 + 32}
"""Kinds of GGUF blocks that kernels may keep: fp16 scale, fp16 offset (Q4_1), 32 integers."""
_HALVES: Final = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # fp16 numbers at the start of a block


@dataclass(frozen=True, slots=True)
class Dense:
    """weight [out, in] of a floating-point dtype."""

    weight: Tensor

    @property
    def form(self) -> str:
        """How the numbers are stored."""
        return str(self.weight.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [out, in] in GGUF blocks: data [out, bytes of a row] uint8, as in the file."""

    form: str  # ggml's name, of BLOCK_BYTES
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.data.shape[0], self.data.shape[1] // BLOCK_BYTES[self.form] * _NEIGHBOURS


StoredMatrix = Dense | Blocks


def dequantize(matrix: StoredMatrix) -> Tensor:
    """The values [out, in]: as they are stored, or those that blocks stand for in fp32."""
    if isinstance(matrix, Dense):
        return matrix.weight
    num_bytes, num_halves = BLOCK_BYTES[matrix.form], _HALVES[matrix.form]
    blocks = matrix.data.reshape(-1, num_bytes)
    scale, *offset = blocks[:, : 2 * num_halves].contiguous().view(torch.float16).float().T
    numbers = blocks[:, 2 * num_halves :]
    if matrix.form == "Q8_0":
        values = numbers.contiguous().view(torch.int8).float()
    else:
        values = torch.cat([numbers & 15, numbers >> 4], dim=1).float()
    if matrix.form == "Q4_0":
        values -= 8
    values *= scale[:, None]  # exact, so that an offset rounds once
    if offset:
        values += offset[0][:, None]
    return values.view(matrix.shape)


def dequantize_blocks(data: Tensor, kind: Any) -> Tensor:
    """The fp32 values of GGUF blocks [rows, bytes] of any kind, in a row. Raises
    NotImplementedError for kinds that the gguf package cannot read."""
    from gguf.quants import dequantize as read

    values = read(_long_rows(data.contiguous().numpy(), len(data)), kind)
    # torch wants memory it may write to.
    return torch.from_numpy(np.require(values, requirements="W")).view(-1)


def all_finite(matrix: StoredMatrix, dtype: torch.dtype) -> bool:
    """Whether every value is a finite number, and so in `dtype`."""
    if isinstance(matrix, Dense):
        return all(bool(bound.to(dtype).isfinite()) for bound in matrix.weight.aminmax())
    blocks = matrix.data.reshape(-1, BLOCK_BYTES[matrix.form])
    # The high byte of an fp16 number without its sign is 124 and more if it is not finite. Of the
    # same sign and at most 255 times as large, values are finite in fp32 if the scales are.
    if any(int((blocks[:, 2 * i + 1] & 127).amax()) >= 124 for i in range(_HALVES[matrix.form])):
        return False
    return dtype is not torch.float16 or all_finite(Dense(dequantize(matrix)), dtype)


def part_of(matrix: StoredMatrix, rows: slice, columns: slice) -> StoredMatrix:
    """Some outputs and inputs. Those of blocks begin and end with a block."""
    if isinstance(matrix, Dense):
        return Dense(matrix.weight[rows, columns])
    first, last, _ = columns.indices(matrix.shape[1])
    if first % _NEIGHBOURS or last % _NEIGHBOURS:
        return Dense(dequantize(Blocks(matrix.form, matrix.data[rows]))[:, columns])
    num_bytes = BLOCK_BYTES[matrix.form]
    begin, end = first // _NEIGHBOURS * num_bytes, last // _NEIGHBOURS * num_bytes
    return Blocks(matrix.form, matrix.data[rows, begin:end])


def stack(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """The parts one below the other: in their form if it is the same for all, else as values."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Blocks) and {part.form for part in parts} == {first.form}:
        return Blocks(first.form, torch.cat([p.data for p in parts if isinstance(p, Blocks)]))
    weights = [dequantize(part) for part in parts]
    if len({weight.dtype for weight in weights}) > 1:
        weights = [weight.float() for weight in weights]
    return Dense(torch.cat(weights))


def _long_rows(raw: np.ndarray[Any, np.dtype[np.uint8]], num_rows: int) -> np.ndarray[Any, Any]:
    """Bytes in rows of whole blocks. The package works through 16 rows at a time, so neighbours
    are joined into rows of up to 32 KiB: 0.7 s instead of 1.6 for the default model."""
    num_rows = max(num_rows, 1)
    while num_rows % 2 == 0 and 2 * raw.size // num_rows <= 2**15:
        num_rows //= 2
    return raw.reshape(num_rows, -1)
