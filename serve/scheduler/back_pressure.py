"""Refusing requests while too much waits, and telling their senders when to come back."""

from __future__ import annotations

import math

from serve.errors import QueueFull
from serve.scheduler.drain_rate import DrainRate
from serve.scheduler.limits import SchedulerLimits


class BackPressure:
    """Limits what may wait. Reads `rate`, which the scheduler keeps."""

    def __init__(self, limits: SchedulerLimits, rate: DrainRate) -> None:
        self._rate = rate
        self.set_limits(limits)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Other limits from now on; what waits already stays."""
        self._max_reqs = limits.max_num_queued_reqs
        self._max_tokens = limits.max_num_queued_tokens

    def check(
        self,
        num_new_tokens: int,
        *,
        num_waiting: int,
        num_swapped: int,
        num_tokens: int,
        num_rows: int,
        now: float,
    ) -> None:
        """Raises QueueFull if a request with so many tokens may not join the queue.

        `num_tokens` are those of all `num_waiting` requests. What the `num_rows` free rows can take
        at once does not count as queued; those swapped out are only waited for.
        """
        num_queued = max(0, num_waiting - num_rows)
        if self._max_reqs is not None and num_queued >= self._max_reqs:
            what = f"{_are(num_queued, 'request')} queued; at most {self._max_reqs} may be"
        elif (
            self._max_tokens is not None
            and num_waiting >= num_rows
            and num_tokens + num_new_tokens > self._max_tokens
        ):
            what = f"{_are(num_tokens, 'token')} queued; at most {self._max_tokens} may be"
        else:
            return
        wait = self.retry_after_s(num_waiting + num_swapped, now)
        raise QueueFull(f"{what}. Try again in {wait:.0f} s.", retry_after_s=wait)

    def retry_after_s(self, num_queued: int, now: float) -> float:
        """Whole seconds, at least 1, that a queue of so many needs at the rate of late."""
        seconds = self._rate.seconds_for(num_queued, now) if num_queued else None
        return 1.0 if seconds is None else float(max(1, math.ceil(seconds)))


def _are(number: int, what: str) -> str:
    return f"1 {what} is" if number == 1 else f"{number} {what}s are"
