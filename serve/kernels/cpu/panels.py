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

_LANES = 16  # outputs side by side in memory: kLanes in simd.h
_BLOCK = 32  # neighbours along `in` that share a scale: kBlock in storage.h
_SAMPLE_ROWS = 16  # enough to see that a matrix was never quantized, without working through it

_STORAGE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BYTES, _NIBBLES = 3, 4


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight [out, in]: `storage` as in api.h, `data` the panels' memory."""

    storage: int
    out_size: int
    in_size: int
    data: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """weight = scale * q (+ offset): q [out, in / 32, 32]; scale, offset [out, in / 32, 1] fp16."""

    scale: Tensor
    offset: Tensor | None
    q: Tensor

    def values(self) -> Tensor:
        """fp32, rounded as GGUF rounds: the product is exact, only the sum is not."""
        products = self.scale.float() * self.q
        return products if self.offset is None else products + self.offset.float()


def make_panels(weight: Tensor) -> Panels:
    """Pack weight [out, in] of any floating dtype."""
    out_size, in_size = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16):
        blocks = find_blocks(weight.float())
        if blocks is not None:
            storage = _BYTES if blocks.offset is None else _NIBBLES
            return Panels(storage, out_size, in_size, _pack_blocks(blocks))
        weight = narrowest(weight)
    lanes = F.pad(weight, (0, 0, 0, -out_size % _LANES)).view(-1, _LANES, in_size)
    return Panels(_STORAGE[weight.dtype], out_size, in_size, lanes.transpose(1, 2))


def narrowest(weight: Tensor) -> Tensor:
    """weight in a 16-bit type if every value survives the way there and back, else in fp32."""
    wide = weight.float()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = wide.to(dtype)
        if torch.equal(narrow.float(), wide):
            return narrow
    return wide


def find_blocks(weight: Tensor) -> Blocks | None:
    """The quantization that fp32 weight [out, in] was made from, or None."""
    if weight.shape[1] % _BLOCK or not weight.numel():
        return None
    values = weight.reshape(weight.shape[0], -1, _BLOCK)
    for find in (_find_q4_1, _find_q4_0, _find_q8_0):
        if find(values[:_SAMPLE_ROWS]) is not None and (blocks := find(values)) is not None:
            return blocks
    return None


def _find_q4_1(values: Tensor) -> Blocks | None:
    """0 stands for a block's smallest value, 15 as a rule for its largest."""
    offset = values.amin(-1, keepdim=True).half()
    reach = values.amax(-1, keepdim=True) - offset.float()
    return _find(values, offset, [(reach / steps).half() for steps in (15, 14, 13)])


def _find_q4_0(values: Tensor) -> Blocks | None:
    """scale * (q - 8), and 0 stands for the value of largest magnitude, whatever its sign."""
    offset = _farthest(values).half()
    return _find(values, offset, [offset / -8])


def _find_q8_0(values: Tensor) -> Blocks | None:
    """127 or -127, or hardly less, stands for the value of largest magnitude."""
    reach = _farthest(values).abs()
    return _find(values, None, [(reach / steps).half() for steps in (127, 126, 125)])


def _find(values: Tensor, offset: Tensor | None, scales: list[Tensor]) -> Blocks | None:
    """Blocks that give exactly `values`, every one with one of these scales, or None."""
    lowest, highest = (-127, 127) if offset is None else (0, 15)
    distance = values if offset is None else values - offset.float()
    q = torch.zeros(values.shape, dtype=torch.int8)
    found = torch.zeros_like(scales[0])
    todo = torch.ones_like(found, dtype=torch.bool)
    for scale in scales:
        steps = (distance / scale.float()).nan_to_num(0, 0, 0).round().clamp(lowest, highest)
        exact = Blocks(scale, offset, steps).values() == values
        fits = exact.all(-1, keepdim=True) & todo
        found = torch.where(fits, scale, found)
        q = torch.where(fits, steps.to(torch.int8), q)
        todo &= ~fits
        if not todo.any():
            return Blocks(found, offset, q)
    return None


def _farthest(values: Tensor) -> Tensor:
    """Each block's value of largest magnitude, with its sign."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))


def _pack_blocks(blocks: Blocks) -> Tensor:
    """[panels, in / 32, bytes of a block] uint8; see storage.h for what lies where."""
    parts = [_by_lane(blocks.scale)]
    if blocks.offset is None:
        parts.append(_by_lane(blocks.q))
    else:
        parts.append(_by_lane(blocks.offset))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)[:, None]
        nibbles = blocks.q.view(*blocks.q.shape[:2], 8, 4).int() << shifts
        parts.append(_by_lane(nibbles.sum(-2, dtype=torch.int32)))
    return torch.cat(parts, dim=-1)


def _by_lane(x: Tensor) -> Tensor:
    """[out, blocks, n] → bytes [panels, blocks, n * 16 * itemsize], the 16 outputs innermost."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % _LANES))
    lanes = padded.view(-1, _LANES, *x.shape[1:]).permute(0, 2, 3, 1)
    return lanes.contiguous().view(torch.uint8).flatten(2)
