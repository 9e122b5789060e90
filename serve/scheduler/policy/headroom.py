"""Blocks to leave free when a queued request is admitted, so that it evicts nobody at once."""

from __future__ import annotations

from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.policy.watermark import Watermark
from serve.scheduler.request import Request


class Headroom:
    """The guard against thrashing. It holds back only admissions beside running requests."""

    def __init__(self, num_blocks: int) -> None:
        self._watermark = Watermark(num_blocks)

    @property
    def watermark_blocks(self) -> int:
        """What every admission leaves free, as things are now."""
        return self._watermark.blocks

    def note_step(self, *, preempted: bool) -> None:
        """A step has been planned."""
        self._watermark.note_step(preempted=preempted)

    def blocks(self, request: Request, num_running: int, limits: SchedulerLimits) -> int:
        """For one request, beside so many running ones.

        None when nothing runs. Otherwise the watermark, and for a request that was preempted
        before, room for the others to grow, which doubles with each of its preemptions: after about
        log2(pool size) of them it comes back only alone. That bounds preemptions per request, with
        no setting to tune and nothing held back from requests that were never preempted.
        """
        if num_running == 0 or not limits.thrash_guard:
            return 0
        doublings = min(request.num_preemptions, 30)
        return self.watermark_blocks + num_running * ((1 << doublings) - 1)
