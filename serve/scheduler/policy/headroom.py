"""Blocks to leave free when a queued request is admitted, so that it evicts nobody at once."""

from __future__ import annotations

from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.request import Request

CALM_STEPS = 64
"""Steps without preemption after which the watermark is halved."""


class Headroom:
    """The guard against thrashing. It holds back only admissions beside running requests, so
    nothing waits for ever.

    `watermark` is what every admission leaves free, as things are now: between 1 % and a quarter of
    the pool (at least one block each). It doubles with every step that preempts, and is halved when
    all is calm.
    """

    def __init__(self, num_blocks: int) -> None:
        self._least = max(1, num_blocks // 100)
        self._most = max(self._least, num_blocks // 4)
        self._num_calm = 0
        self.watermark = self._least

    def note_step(self, *, preempted: bool) -> None:
        """A step has been planned."""
        if preempted:
            self._num_calm = 0
            self.watermark = min(self._most, 2 * self.watermark)
            return
        self._num_calm += 1
        if self._num_calm >= CALM_STEPS:
            self._num_calm = 0
            self.watermark = max(self._least, self.watermark // 2)

    def blocks(self, request: Request, num_running: int, limits: SchedulerLimits) -> int:
        """For one request, beside so many running ones.

        0 when nothing runs. Otherwise the watermark, and for a request that
        was preempted before, room for the others to grow, which doubles with each of its
        preemptions: after about log2(pool size) of them it comes back only alone. That bounds
        preemptions per request, with no setting to tune and nothing held back from requests that
        were never preempted.
        """
        if num_running == 0 or not limits.thrash_guard:
            return 0
        doublings = min(request.num_preemptions, 30)
        return self.watermark + num_running * ((1 << doublings) - 1)
