"""Penalties, and the draw of a token within top_k, top_p and min_p without sorting the vocabulary.

Shapes   logits [S, V]; controls [S, >= 4]: temperature, top_k, top_p, min_p; keys [S, 2] int32, one
         pair per (seed, position) → token ids [S] int64.
Dtypes   fp32.
Grid     one program per row to draw; [S, V / 1024] for penalties.
Bytes    a draw reads its row 2 times, 4 more under top_k, and once per rejected candidate under
         top_p (few: each was drawn with its own probability). FLOPs: about 30 per token and read.
Source   Gumbel-max draw with counter-based noise, as in worker/sampling/noise.py, so a seed gives
         its token in any batch; rejection in place of sorting: FlashInfer's sampling (2025), where
         each rejected candidate becomes the pivot; top_k by radix select (Alabi et al., 2012).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
BANNED = tl.constexpr(-3.4028234663852886e38)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def draw_kernel(
    out_ptr,
    logits_ptr,
    controls_ptr,
    keys_ptr,
    logits_stride,
    controls_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    controls_row_ptr = controls_ptr + row * controls_stride
    temperature = tl.load(controls_row_ptr)
    top_k = tl.load(controls_row_ptr + 1)
    top_p = tl.load(controls_row_ptr + 2)
    floor = tl.log(tl.load(controls_row_ptr + 3))  # of min_p, relative to the best token
    first_key = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True) | 1

    values = tl.full([TILE], float("-inf"), tl.float32)
    places = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, VOCAB, TILE):
        tokens = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf"))
        places = tl.where(logit > values, tokens, places)
        values = tl.maximum(values, logit)
    highest, token = best_of(values, places)
    if temperature == 0.0:
        tl.store(out_ptr + row, token.to(tl.int64))
        return
    # Relative to the row's maximum nothing overflows, however small the temperature.
    highest = tl.maximum(highest, BANNED)

    # A scaled logit is at most 0, so its bits without the sign grow as it gets less likely; this
    # "rank" is what top_k and top_p bound.
    last_rank = tl.full([], INFINITE, tl.int32)
    if top_k < VOCAB:
        last_rank = kth_rank(row_ptr, highest, temperature, floor, top_k, VOCAB, TILE)

    mass, _, token = scan_below(
        row_ptr, highest, temperature, floor, last_rank + 1, first_key, second_key, VOCAB, TILE
    )
    goal = mass * top_p
    accepted = top_p >= 1.0
    while accepted == 0:
        logit = tl.load(row_ptr + token)
        rank = rank_of(scaled_logit(logit, highest, temperature, floor))
        mass, _, next_token = scan_below(
            row_ptr, highest, temperature, floor, rank, first_key, second_key, VOCAB, TILE
        )
        accepted = (mass < goal) | (mass == 0.0)
        token = tl.where(accepted, token, next_token)
    tl.store(out_ptr + row, token.to(tl.int64))


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
    """Over the tokens ranked before `rank_end`: their mass, and the draw (its value and token)."""
    mass = tl.zeros([TILE], tl.float32)
    values = tl.full([TILE], float("-inf"), tl.float32)
    places = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, VOCAB, TILE):
        tokens = start + tl.arange(0, TILE)
        logit = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf"))
        scaled = scaled_logit(logit, highest, temperature, floor)
        scaled = tl.where(rank_of(scaled) < rank_end, scaled, float("-inf"))
        mass += tl.exp(scaled)
        noisy = scaled + gumbel(tokens, first_key, second_key)
        places = tl.where(noisy > values, tokens, places)
        values = tl.maximum(values, noisy)
    value, token = best_of(values, places)
    return tl.sum(mass, 0), value, token


@triton.jit
def kth_rank(row_ptr, highest, temperature, floor, top_k, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The rank of the top_k-th token, one byte at a time from the highest."""
    remaining = top_k.to(tl.int32)
    prefix = tl.zeros([], tl.int32)
    bins = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros([256], tl.int32)
        for start in tl.range(0, VOCAB, TILE):
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


@triton.jit
def penalize_kernel(
    logits_ptr,
    controls_ptr,
    generated_ptr,
    in_prompt_ptr,
    logits_stride,
    controls_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = tokens < VOCAB
    presence = tl.load(controls_ptr + row * controls_stride)
    frequency = tl.load(controls_ptr + row * controls_stride + 1)
    repetition = tl.load(controls_ptr + row * controls_stride + 2)
    generated = tl.load(generated_ptr + row * VOCAB + tokens, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + row * VOCAB + tokens, mask=mask, other=0)
    logit_ptrs = logits_ptr + row * logits_stride + tokens
    logit = tl.load(logit_ptrs, mask=mask, other=0.0)
    weakened = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit = tl.where((generated > 0) | (in_prompt != 0), weakened, logit)
    written = (generated > 0).to(tl.float32)
    logit -= frequency * generated.to(tl.float32) + presence * written
    tl.store(logit_ptrs, logit, mask=mask)


def draw(logits: Tensor, controls: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """One token per row, after temperature, min_p, top_k and top_p, in this order; in `out` or new.

    Temperature 0 takes the most likely token. top_k >= V, top_p >= 1 and min_p 0 are off. Tokens
    as likely as the last one within top_k or top_p are within, too. Nothing comes back to the host.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == controls.dtype == torch.float32, (logits.dtype, controls.dtype)
    assert logits.stride(1) == controls.stride(1) == 1, (logits.stride(), controls.stride())
    assert controls.shape[0] == num_rows, (controls.shape, logits.shape)
    assert controls.shape[1] >= 4, controls.shape
    assert keys.shape == (num_rows, 2), (keys.shape, logits.shape)
    assert keys.dtype == torch.int32, keys.dtype
    assert keys.is_contiguous(), keys.stride()
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    assert out.shape == (num_rows,), (out.shape, num_rows)
    assert out.dtype == torch.int64, out.dtype
    assert out.is_contiguous(), out.stride()
    if num_rows:
        draw_kernel[(num_rows,)](
            out,
            logits,
            controls,
            keys,
            logits.stride(0),
            controls.stride(0),
            VOCAB=vocab_size,
            TILE=_TILE,
            num_warps=8,
        )
    return out


def penalize(logits: Tensor, controls: Tensor, generated: Tensor, in_prompt: Tensor) -> None:
    """Apply presence, frequency and repetition penalties (the columns of controls [S, 3]) in place.

    generated [S, V]: how often each token was sampled; in_prompt [S, V]: whether the prompt has it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == controls.dtype == torch.float32, (logits.dtype, controls.dtype)
    assert logits.stride(1) == controls.stride(1) == 1, (logits.stride(), controls.stride())
    assert controls.shape == (num_rows, 3), (controls.shape, logits.shape)
    for counts in (generated, in_prompt):
        assert counts.shape == logits.shape, (counts.shape, logits.shape)
        assert counts.is_contiguous(), counts.stride()
    if num_rows:
        penalize_kernel[(num_rows, triton.cdiv(vocab_size, _TILE))](
            logits,
            controls,
            generated,
            in_prompt,
            logits.stride(0),
            controls.stride(0),
            VOCAB=vocab_size,
            TILE=_TILE,
            num_warps=4,
        )
