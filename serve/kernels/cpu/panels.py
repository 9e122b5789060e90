"""Weights in the narrowest form that gives back every bit, laid out for the C++ kernels.

Forms, in the order they are tried: blocks of 4-bit integers, blocks of 8-bit integers, float16,
bfloat16, float32. A form is taken only if all of the matrix comes back from it unchanged, so the
choice never shows in a result, only in the memory a step has to read. Dequantized GGUF weights go
back into their blocks this way and 16-bit checkpoints into 16 bits, however they were loaded.
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
_BYTES, _NIBBLES = 3, 4
_BLOCK_BYTES = {_BYTES: 32 + 512, _NIBBLES: 64 + 256}
_FORMS = (_NIBBLES, _NIBBLES, _BYTES)  # storage of the forms serve_pack_blocks tries


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight [out, in]: `storage` as in api.h, `data` the panels' memory."""

    storage: int
    out_size: int
    in_size: int
    data: Tensor


def make_panels(library: Library, weight: Tensor) -> Panels:
    """Pack weight [out, in] of any floating dtype."""
    out_size, in_size = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16):
        if (blocks := _find_blocks(library, weight.float().contiguous())) is not None:
            return blocks
        weight = _narrowest(weight)
    lanes = F.pad(weight, (0, 0, 0, -out_size % _LANES)).view(-1, _LANES, in_size)
    return Panels(_STORAGE[weight.dtype], out_size, in_size, lanes.transpose(1, 2))


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
