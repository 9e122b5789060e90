"""How a running request gives up its blocks, and how much room it needs to come back."""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.request import Request


class PreemptionMode(Enum):
    """RECOMPUTE drops the KV and prefills again later; SWAP keeps it in host memory."""

    RECOMPUTE = auto()
    SWAP = auto()


def choose_mode(
    victim: Request, kv: KVCacheManager, configured: Literal["recompute", "swap", "auto"]
) -> PreemptionMode:
    """Swapping needs room on the host: without it the victim is recomputed, whatever is set."""
    if configured == "recompute" or not kv.can_swap_out(victim.num_computed_tokens):
        return PreemptionMode.RECOMPUTE
    return PreemptionMode.SWAP


def headroom(request: Request, num_running: int, watermark: int) -> int:
    """Blocks to leave free when admitting a request, so that it does not evict its elders at once.

    None when nothing runs. Otherwise the watermark, and for a request that was preempted before,
    room for the others to grow, which doubles with each of its preemptions: after about
    log2(pool size) of them it comes back only alone. That bounds preemptions per request, with no
    setting to tune and nothing held back from requests that were never preempted.
    """
    if num_running == 0:
        return 0
    doublings = min(request.num_preemptions, 30)
    return watermark + num_running * ((1 << doublings) - 1)
