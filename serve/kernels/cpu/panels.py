"""Weights in the narrowest form that gives back every bit, laid out for the C++ kernels.

Forms: the blocks of a GGUF file, float16, bfloat16, float32. Blocks and 16-bit weights are kept as
they are stored, and 32-bit ones in 16 bits if all of the matrix comes back from them unchanged; so
the form never shows in a result, only in the memory a step has to read.

int8 is the form that loses something, and is taken only when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.cpu.library import Library
from serve.kernels.stored import Blocks, StoredMatrix

_LANES = 16  # outputs side by side in memory: kLanes in simd.h
_BLOCK = 32  # neighbours along `in` that share a scale: kBlock in storage.h

_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BYTES, _NIBBLES, _INT8 = 3, 4, 5
_BLOCK_BYTES = {_BYTES: 32 + 512, _NIBBLES: 64 + 256}
_FORMS = {"Q4_1": (0, _NIBBLES), "Q4_0": (1, _NIBBLES), "Q8_0": (2, _BYTES)}
"""GGUF's name → the form that serve_pack_blocks reads, and the storage that it writes."""
_MOST_INT8 = 127
_LEAST_SCALE = 1e-38  # smaller ones have no inverse: such an output counts as zero

KEPT = frozenset({*_FORMS, "float16", "bfloat16"})
"""Forms that are not widened."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight [out, in]: `storage` as in api.h, `data` the panels' memory."""

    storage: int
    out_size: int
    in_size: int
    data: Tensor


def pack_blocks(
    library: Library, parts: Sequence[StoredMatrix], allocate: Callable[[int], Tensor]
) -> Panels | None:
    """Pack blocks of one form as they are, straight into memory of `allocate`.

    None for other matrices, and for Q4_0 with scales so large that eight times them is beyond 16
    bits.
    """
    blocks = [part for part in parts if isinstance(part, Blocks)]
    if len(blocks) < len(parts) or len({part.form for part in blocks}) > 1:
        return None
    form, storage = _FORMS[blocks[0].form]
    out_size, in_size = sum(part.shape[0] for part in blocks), blocks[0].shape[1]
    shape = (-(-out_size // _LANES), in_size // _BLOCK, _BLOCK_BYTES[storage])
    data = allocate(math.prod(shape)).view(shape)
    data[-1].zero_()  # for lanes that no output fills
    first = 0
    for part in blocks:
        raw, count = part.data.contiguous(), part.shape[0]
        if not library.pack_blocks(
            library.pool, form, raw.data_ptr(), first, count, in_size, data.data_ptr()
        ):
            return None
        first += count
    return Panels(storage, out_size, in_size, data)


def make_panels(weight: Tensor) -> Panels:
    """Pack weight [out, in] of any floating dtype without loss."""
    out_size, in_size = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16):
        weight = _narrowest(weight)
    lanes = F.pad(weight, (0, 0, 0, -out_size % _LANES)).view(-1, _LANES, in_size)
    return Panels(_STORAGE[weight.dtype], out_size, in_size, lanes.transpose(1, 2))


def quantize_panels(weight: Tensor) -> Panels:
    """Round weight [out, in] to int8 with one scale per output, as integer.cpp reads it.

    An output whose weights are not all finite becomes NaN.
    """
    out_size, in_size = weight.shape
    wide = F.pad(weight.float(), (0, in_size % 2, 0, -out_size % _LANES))
    scales = wide.abs().amax(dim=1) / _MOST_INT8
    rounded = (wide / scales.clamp_min(_LEAST_SCALE)[:, None]).round_().nan_to_num_(nan=0)
    pairs = rounded.to(torch.int8).view(-1, _LANES, wide.shape[1] // 2, 2).transpose(1, 2)
    data = torch.cat([_bytes_of(scales.view(-1, _LANES)), _bytes_of(pairs)], dim=1)
    return Panels(_INT8, out_size, in_size, data)


def _bytes_of(values: Tensor) -> Tensor:
    """[panels, …] as uint8 [panels, bytes]."""
    return values.contiguous().view(torch.uint8).flatten(1)


def _narrowest(weight: Tensor) -> Tensor:
    """weight in a 16-bit type if every value survives the way there and back, else in fp32."""
    wide = weight.float()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return narrow
    return wide
