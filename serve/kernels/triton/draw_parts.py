"""What a draw does with tokens: scale and rank them, count them, add noise, and take the best.

Device functions only: they are inlined into the kernels of sampling.py. A scaled logit is at most
0, so its bits without the sign grow as it gets less likely; this "rank" is what top_k and top_p
bound. `…_list` and `…_listed_…` look at a row's list in registers, their twins at all its logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
"""The rank of a token that is out of the question."""


@triton.jit
def scaled_logit(logit, highest, temperature, floor):
    """The logit relative to the best one and divided by the temperature; -inf under min_p."""
    scaled = (logit - highest) / temperature
    return tl.where(scaled < floor, float("-inf"), scaled)


@triton.jit
def rank_of(scaled):
    """0 for the best token, larger for less likely ones; equal for equally likely ones."""
    return scaled.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def best_of(values, places):
    """The largest value and the smallest place that has it."""
    highest = tl.max(values, 0)
    return highest, tl.min(tl.where(values == highest, places, MAGNITUDE), 0)


@triton.jit
def scan_list(scaled, listed, rank_end, first_key, second_key):
    """Over the listed tokens ranked before `rank_end`: their mass, and the draw."""
    scaled = tl.where(rank_of(scaled) < rank_end, scaled, float("-inf"))
    _, token = best_of(scaled + gumbel(listed, first_key, second_key), listed)
    return tl.sum(tl.exp(scaled), 0), token


@triton.jit
def kth_listed_rank(scaled, top_k):
    """The rank of the top_k-th token, one byte at a time from the highest."""
    remaining = top_k.to(tl.int32)
    prefix = tl.zeros([], tl.int32)
    bins = tl.arange(0, 256)
    rank = rank_of(scaled)
    for shift in tl.static_range(24, -8, -8):
        inside = scaled > float("-inf")
        if shift < 24:
            inside = inside & ((rank >> (shift + 8)) == prefix)
        counts = tl.histogram((rank >> shift) & 255, 256, mask=inside)
        reached = tl.cumsum(counts, 0)
        digit = tl.sum((reached < remaining).to(tl.int32), 0)
        remaining -= tl.sum(tl.where(bins < digit, counts, 0), 0)
        prefix = (prefix << 8) | digit
    return prefix


@triton.jit
def scan_below(
    row_ptr,
    highest,
    temperature,
    floor,
    rank_end,
    first_key,
    second_key,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Over all tokens ranked before `rank_end`: their mass, and the draw."""
    mass = tl.zeros([TILE], tl.float32)
    values = tl.full([TILE], float("-inf"), tl.float32)
    places = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, VOCAB, TILE, num_stages=4):
        tokens = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf"))
        scaled = scaled_logit(logit, highest, temperature, floor)
        scaled = tl.where(rank_of(scaled) < rank_end, scaled, float("-inf"))
        mass += tl.exp(scaled)
        noisy = scaled + gumbel(tokens, first_key, second_key)
        places = tl.where(noisy > values, tokens, places)
        values = tl.maximum(values, noisy)
    _, token = best_of(values, places)
    return tl.sum(mass, 0), token


@triton.jit
def kth_rank(row_ptr, highest, temperature, floor, top_k, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The same among all tokens."""
    remaining = top_k.to(tl.int32)
    prefix = tl.zeros([], tl.int32)
    bins = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, VOCAB, TILE, num_stages=4):
            tokens = start + tl.arange(0, TILE)
            inside = tokens < VOCAB
            logit = tl.load(row_ptr + tokens, mask=inside, other=float("-inf"))
            rank = rank_of(scaled_logit(logit, highest, temperature, floor))
            if shift < 24:
                inside = inside & ((rank >> (shift + 8)) == prefix)
            counts += tl.histogram((rank >> shift) & 255, 256, mask=inside)
        reached = tl.cumsum(counts, 0)
        digit = tl.sum((reached < remaining).to(tl.int32), 0)
        remaining -= tl.sum(tl.where(bins < digit, counts, 0), 0)
        prefix = (prefix << 8) | digit
    return prefix


@triton.jit
def gumbel(tokens, first_key, second_key):
    """Noise of (seed, position, token): worker/sampling/noise.py's, bit for bit up to the log."""
    bits = mixed(tokens.to(tl.uint32, bitcast=True) * 2654435769) ^ first_key
    bits = mixed(bits * second_key) & 0x7FFFFFFF
    uniform = (bits.to(tl.float32) + 0.5) * (4.656612873077393e-10 * (1.0 - 1.1920928955078125e-07))
    return -tl.log(-log_of_one_minus(uniform))


@triton.jit
def mixed(bits):
    """murmur3's finalizer."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def log_of_one_minus(x):
    """log(1 - x), for small x too: the rounding of 1 - x is undone (Kahan's log1p)."""
    rest = 1.0 - x
    lost = rest - 1.0
    return tl.where(lost == 0.0, -x, tl.log(rest) * (-x / tl.where(lost == 0.0, 1.0, lost)))
