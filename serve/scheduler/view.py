"""The scheduler as others may see it: who is where, what is full, and why somebody waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.admission import Admission
from serve.scheduler.door import DrainRate
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.policy.passing import most_that_passes
from serve.scheduler.request import Request
from serve.scheduler.roster import Roster


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Read only: nothing here changes anything, and requests are only to be looked at.

    It shows the moment at which it is asked, but for the `limits`: those are of the moment at which
    it was made.
    """

    limits: SchedulerLimits
    clock: Callable[[], float]
    live: Mapping[str, Request]  # all that have not ended, by id
    _kv: KVCacheManager
    _roster: Roster
    _admission: Admission
    _rate: DrainRate

    # ------------------------------------------------------------------ requests

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._roster.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of all that wait."""
        return self._roster.waiting.num_tokens

    def running(self, at_most: int) -> list[Request]:
        """The first of those that run, in order of service."""
        return self._roster.running[:at_most]

    def waiting(self, at_most: int) -> list[Request]:
        """The first of those that wait, in order of service."""
        return _first(at_most, self._roster.waiting)

    def swapped(self, at_most: int) -> list[Request]:
        """The first of those that are swapped out, in order of service."""
        return _first(at_most, self._roster.swapped)

    # ------------------------------------------------------------------ blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._kv.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self._kv.num_blocks

    @property
    def num_blocks_free(self) -> int:
        """Device blocks that can be taken."""
        return self._kv.num_blocks_free

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._kv.num_host_blocks

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefixes are shared."""
        return self._kv.enable_prefix_caching

    def counts(self) -> tuple[int, int, int, int, int]:
        """Requests that run, wait and are swapped out; blocks in use on the device and the host.
        Asked once a step, so in one call, which asks no queue while nobody is queued."""
        num_running = len(self._roster.running)
        num_queued = len(self.live) - num_running
        num_waiting = len(self._roster.waiting) if num_queued else 0
        return (
            num_running,
            num_waiting,
            num_queued - num_waiting,
            self._kv.num_blocks_used,
            self._kv.num_host_blocks_used,
        )

    # ------------------------------------------------------------------ why somebody waits

    def num_ahead(self, request: Request) -> int:
        """Queued requests that are served before this queued one. O(n)."""
        begun = self._begun_prompt()
        if begun is None or not self._passes(request, begun):
            return self._roster.num_ahead(request, math.inf)
        return self._roster.num_ahead(request, most_that_passes(begun))

    def blocks_needed(self, request: Request) -> tuple[int, int]:
        """Blocks that a queued request needs to be admitted, and those that must then stay free for
        the ones that run."""
        return self._admission.blocks_needed(request, self.limits)

    def prompt_in_the_way(self, request: Request) -> Request | None:
        """A long prompt that has begun, and must be finished before this queued request starts."""
        begun = self._begun_prompt()
        return None if begun is None or self._passes(request, begun) else begun

    def seconds_to_start(self, num_ahead: int) -> float | None:
        """When the queued request behind so many others will be admitted, at the rate of late; None
        while nothing is known. A refusal's Retry-After is the same for one behind them all."""
        return self._rate.seconds_for(num_ahead + 1, self.clock())

    def _begun_prompt(self) -> Request | None:
        """The longest prompt that has begun and is not finished, which much shorter ones pass."""
        begun = [r for r in self._roster.running if r.num_uncomputed_tokens > 1]
        return max(begun, key=lambda r: r.num_uncomputed_tokens, default=None)

    def _passes(self, request: Request, begun: Request) -> bool:
        return self.limits.fair_prefill and self._admission.passes(request, begun)


def _first(at_most: int, queue: Iterable[Request]) -> list[Request]:
    return nsmallest(at_most, queue, key=attrgetter("place_in_line"))
