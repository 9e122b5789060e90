"""Counter-based random noise: a pure function of (seed, position, token id).

A generator with state would make a request's draws depend on what else was drawn before it; here
the same request gets the same noise alone or in any batch, in any row, and again after preemption.

Tokens are drawn by the Gumbel-max trick: the argmax of logit + Gumbel noise is a sample from the
softmax. Unlike inverting the cumulative distribution, it compares tokens one by one, so rounding
differences of 1e-6 between batch sizes flip a draw about once in a million.
Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for the idea;
Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014), for splitmix64;
Appleby's murmur3 finalizer for the constants of the 32-bit mix.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SPLITMIX_STEP = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SPLITMIX_SECOND = np.uint64(0x94D049BB133111EB)

# The murmur3 constants as signed numbers: torch has no unsigned 32-bit arithmetic on all devices,
# but its int32 products wrap around, which is all that hashing needs.
_MIX_FIRST = 0x85EBCA6B - 2**32
_MIX_SECOND = 0xC2B2AE35 - 2**32

# 31 random bits become a uniform number in (0, 1); the factor keeps the largest below 1 in float32.
_TO_UNIT = 2.0**-31 * (1.0 - 2.0**-23)


def noise_keys(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """[S] seeds and positions → [S, 2] keys: one for each (seed, position), well mixed."""
    seed, position = seeds.view(np.uint64), positions.view(np.uint64)
    mixed = _splitmix64(_splitmix64(seed) ^ position)
    return mixed.view(np.int32).reshape(-1, 2)


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab] int32: each token id scattered over 32 bits; the fixed part of the noise."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return _mix32(ids.mul_(-1640531527))  # 2^32 / golden ratio: neighbours land far apart


def gumbel(hashes: Tensor, keys: Tensor) -> Tensor:
    """Gumbel noise [S, n] fp32 for the tokens behind `hashes` [n] or [S, n]; keys: [S, 2] int32.

    All values are finite.
    """
    bits = hashes ^ keys[:, :1]
    bits.mul_(keys[:, 1:] | 1)  # odd factors lose no bits
    uniform = (_mix32(bits) & 0x7FFFFFFF).to(torch.float32)
    # log1p keeps the small numbers apart, which decide for rare tokens.
    exponential = uniform.add_(0.5).mul_(-_TO_UNIT).log1p_().neg_()
    return exponential.log_().neg_()


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _SPLITMIX_STEP
    x = (x ^ (x >> np.uint64(30))) * _SPLITMIX_FIRST
    x = (x ^ (x >> np.uint64(27))) * _SPLITMIX_SECOND
    return x ^ (x >> np.uint64(31))


def _mix32(x: Tensor) -> Tensor:
    """murmur3's finalizer, in place. int32 shifts copy the sign, hence the masks."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX_FIRST
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX_SECOND
    x ^= (x >> 16) & 0xFFFF
    return x
