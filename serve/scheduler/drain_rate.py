"""How fast the queue moves: the one measure behind Retry-After and every estimated start."""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Moves of the queue from which its rate is measured."""

MEMORY_S = 60.0
"""What the queue did longer ago than this, before it was empty, says nothing about today's."""


class DrainRate:
    """Counts who leaves the queue, to start or to come back, and only time in which somebody waits.

    A request that starts in the first step after its arrival did not queue, and a server that has
    nothing to do is not slow: neither tells how long a queue takes.
    """

    def __init__(self) -> None:
        self._moves: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds, requests
        self._last_move = 0.0
        self._since: float | None = None  # the last move, or when somebody began to wait

    def note_step(self, now: float, *, num_admitted: int, num_queued: int) -> None:
        """A step has been planned: so many have left the queue, and so many are still in it."""
        since = self._since
        if since is not None and num_admitted:
            self._moves.append((now - since, num_admitted))
            self._last_move, since = now, None
        if not num_queued:
            since = None
        elif since is None:
            if now - self._last_move > MEMORY_S:
                self._moves.clear()
            since = now
        self._since = since

    def seconds_for(self, num_requests: int, now: float) -> float | None:
        """Until so many more will have left the queue; None while nothing is known.

        It grows while nothing moves, and those who move together are waited for together.
        """
        if not self._moves:
            return None
        seconds = sum(seconds for seconds, _ in self._moves)
        num_moved = sum(count for _, count in self._moves)
        per_move, each = seconds / len(self._moves), seconds / num_moved
        waited = 0.0 if self._since is None else now - self._since
        each = max(each, (seconds + waited) / (num_moved + 1))
        return max(num_requests * each, per_move - waited)
