"""Keys and values in eight bits: e4m3 times a scale per KV head.

A cached number is its e4m3 value times the scale of its layer, half (keys, values) and head, from
a table [2, num_kv_heads] fp32; one scale for a whole layer is a table of equal numbers. Attention
needs no multiplication per key for it: the keys' scale joins the softmax scale, and the values'
scale is applied once to the result.

Where the GPU converts e4m3 itself the cache is handed to the kernels as that type, elsewhere as
plain bytes, which the kernels take apart. Both give the same numbers.
Source: FP8 Formats for Deep Learning (arXiv:2209.05433); e4m3 has no infinities and ends at 448.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)
SMALLEST_NORMAL = tl.constexpr(0.015625)  # 2^-6; below it, multiples of 2^-9
FIRST_CUDA_ARCH = 89
"""The first NVIDIA generation with conversions to and from e4m3."""


@triton.jit
def widen(stored, like):
    """Cached numbers in the dtype of `like`, without their scale."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        # The same exponent and mantissa as half precision counts 2^-8 of it, subnormals too.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        wide = (half.to(tl.float32) * 256.0).to(like.dtype)
    else:
        wide = stored.to(like.dtype)
    return wide


@triton.jit
def narrow(x, scale, element: tl.constexpr, HAS_SCALES: tl.constexpr):
    """x in the cache's element type; with scales x / scale, rounded to nearest and bounded."""
    if HAS_SCALES:
        x = x.to(tl.float32) / scale
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return e4m3_bits(x) if element == tl.uint8 else x.to(element)


@triton.jit
def e4m3_bits(x):
    """fp32 within ±448 → its nearest e4m3, ties to even, as a byte."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Half a step less the tie, and the last kept bit: rounds to even. 120 = 127 - 7 rebiases.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Around 2^14 neighbouring fp32 are 2^-9 apart, so the addition rounds to the subnormal step.
    shifted = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(magnitude < SMALLEST_NORMAL, shifted, normal) | sign).to(tl.uint8)


def converts_e4m3(target: str) -> bool:
    """Whether Triton converts e4m3 on a target of tiles.py. AMD's does, in software if need be."""
    backend, _, arch = target.partition(":")
    return backend == "hip" or (backend == "cuda" and int(arch) >= FIRST_CUDA_ARCH)
