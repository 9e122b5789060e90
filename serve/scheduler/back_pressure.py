"""Refusing requests while too much waits, and telling their senders when to come back."""

from __future__ import annotations

import math
from collections import deque

from serve.errors import QueueFull
from serve.scheduler.limits import SchedulerLimits

WINDOW = 64
"""Starts from which the drain rate is measured."""


class BackPressure:
    """Limits what may wait; remembers when requests left the queue to run for the first time."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._starts: deque[float] = deque(maxlen=WINDOW)
        self.set_limits(limits)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Other limits from now on; what waits already stays."""
        self._max_reqs = limits.max_num_queued_reqs
        self._max_tokens = limits.max_num_queued_tokens

    def note_start(self, now: float) -> None:
        """A request that never ran before has started."""
        self._starts.append(now)

    def check(
        self, num_new_tokens: int, *, num_waiting: int, num_tokens: int, num_rows: int, now: float
    ) -> None:
        """Raises QueueFull if a request with so many tokens may not join the queue.

        `num_tokens` are those of all `num_waiting` requests. What the `num_rows` free rows can take
        at once does not count as queued.
        """
        num_queued = max(0, num_waiting - num_rows)
        if self._max_reqs is not None and num_queued >= self._max_reqs:
            what = f"{num_queued} requests are queued; at most {self._max_reqs} may be"
        elif (
            self._max_tokens is not None
            and num_waiting >= num_rows
            and num_tokens + num_new_tokens > self._max_tokens
        ):
            what = f"{num_tokens} tokens are queued; at most {self._max_tokens} may be"
        else:
            return
        wait = self.seconds_until_drained(num_waiting, now)
        raise QueueFull(f"{what}. Try again in {wait:.0f} s.", retry_after_s=wait)

    def seconds_until_drained(self, num_waiting: int, now: float) -> float:
        """Whole seconds, at least 1, that the present queue needs at the rate of late.

        Time since the last start counts, so that the estimate grows while nothing starts.
        """
        if len(self._starts) < 2 or now <= self._starts[0]:
            return 1.0
        per_start = (now - self._starts[0]) / len(self._starts)
        return float(max(1, math.ceil(num_waiting * per_start)))
