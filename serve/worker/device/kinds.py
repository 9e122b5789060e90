"""Kinds of device as data: what holds for one that need not be here.

The engine reads them of the device it serves on, and `serve-llm plan` of any, so both reckon with
the same facts; nothing else asks which kind it has before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind. Shares are of its memory, sizes in bytes."""

    name: str  # the word for it in --device and in the kernel selection
    arithmetic: torch.dtype | None  # of activations, keys and values; None: as the weights
    packs_weights: bool  # each matrix is kept in the narrowest form that loses nothing
    token_budgets: tuple[tuple[int, int], ...]  # (from so much memory on, tokens per step)
    depth: int  # steps that may be out at once
    context_bytes: int  # used from the start, and no part of torch's memory; an estimate
    tries_largest_step: bool  # what it takes is measured, and stays free beside the KV pool
    usable_share: float | None  # that may be in use if no share is asked for; None: see below
    pool_share: float = 0.0  # of what is left, for the KV pool, where memory also serves others
    largest_pool_bytes: int = 0  # then

    def compute_dtype(self, weights: torch.dtype) -> torch.dtype:
        """What activations, keys and values are in, for weights of this dtype."""
        return self.arithmetic or weights

    def token_budget(self, memory_bytes: int) -> int:
        """Tokens per step, when the user names no number, on one with so much memory."""
        return [tokens for least, tokens in self.token_budgets if least <= memory_bytes][-1]

    def usable_bytes(self, total_bytes: int, share: float | None) -> int:
        """How much of its memory may be in use, if `share` is asked for."""
        asked = self.usable_share if share is None else share
        return total_bytes if asked is None else int(total_bytes * asked)

    def pool_bytes(self, left_bytes: int, total_bytes: int, share: float | None) -> int:
        """The KV pool where so much is left beside all else; 0 or less: there is no room for one.
        It fills up the share that was asked for, or else what this kind lends."""
        if share is None and self.usable_share is None:
            return min(int(left_bytes * self.pool_share), self.largest_pool_bytes)
        return self.usable_bytes(total_bytes, share) - (total_bytes - left_bytes)


CPU = DeviceKind(
    name="cpu",
    # 16-bit arithmetic is emulated on most CPUs: slower than fp32, and it rounds every step.
    arithmetic=torch.float32,
    packs_weights=True,
    # Running streams wait for a step's prompt tokens: half a second for these on two cores with a
    # 135M model, four for 2048. They also stay in the caches, which is worth 5 % of a prompt's
    # time.
    token_budgets=((0, 256),),
    # A step has run when its launch returns: a second one would only compute a token too many for
    # each request that stops.
    depth=1,
    context_bytes=0,
    tries_largest_step=False,
    usable_share=None,
    pool_share=0.25,
    largest_pool_bytes=4 * GIB,
)

CUDA = DeviceKind(
    name="cuda",
    arithmetic=None,
    packs_weights=False,
    token_budgets=((0, 2048), (70 * GIB, 8192)),
    depth=2,
    context_bytes=int(0.6 * GIB),  # the CUDA context, libraries' workspaces
    tries_largest_step=True,
    usable_share=0.9,
)

KINDS = {kind.name: kind for kind in (CPU, CUDA)}
