"""Weights in the narrowest form that gives back every bit, laid out for the C++ kernels.

Forms, in the order they are tried: blocks of 4-bit integers, blocks of 8-bit integers, float16,
bfloat16, float32. A form is taken only if all of the matrix comes back from it unchanged, so the
choice never shows in a result, only in the memory a step has to read. Dequantized GGUF weights go
back into their blocks this way and 16-bit checkpoints into 16 bits, however they were loaded.

int8 is the form that loses something, and is taken only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.cpu.library import Library

_LANES = 16  # outputs side by side in memory: kLanes in simd.h
_BLOCK = 32  # neighbours along `in` that share a scale: kBlock in storage.h

_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BYTES, _NIBBLES, _INT8 = 3, 4, 5
_BLOCK_BYTES = {_BYTES: 32 + 512, _NIBBLES: 64 + 256}
_MOST_INT8 = 127
_LEAST_SCALE = 1e-38  # smaller ones have no inverse: such an output counts as zero
_FORMS = (_NIBBLES, _NIBBLES, _BYTES)  # storage of the forms serve_pack_blocks tries


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight [out, in]: `storage` as in api.h, `data` the panels' memory."""

    storage: int
    out_size: int
    in_size: int
    data: Tensor


def make_panels(library: Library, weight: Tensor) -> Panels:
    """Pack weight [out, in] of any floating dtype without loss."""
    out_size, in_size = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16):
        if (blocks := _find_blocks(library, weight.float().contiguous())) is not None:
            return blocks
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


def _find_blocks(library: Library, weight: Tensor) -> Panels | None:
    """The quantization that fp32 weights were made from, if there was one."""
    out_size, in_size = weight.shape
    if in_size % _BLOCK or not weight.numel():
        return None
    for form, storage in enumerate(_FORMS):
        shape = (-(-out_size // _LANES), in_size // _BLOCK, _BLOCK_BYTES[storage])
        data = torch.empty(shape, dtype=torch.uint8)
        if library.pack_blocks(
            library.pool, form, weight.data_ptr(), out_size, in_size, data.data_ptr()
        ):
            return Panels(storage, out_size, in_size, data)
    return None


def _narrowest(weight: Tensor) -> Tensor:
    """weight in a 16-bit type if every value survives the way there and back, else in fp32."""
    wide = weight.float()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return narrow
    return wide
