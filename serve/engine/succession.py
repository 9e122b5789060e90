"""Whether a dead engine is followed by another one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from serve.engine.client import EngineClient

WINDOW_S = 60.0
"""Deaths count against `most` for so long: what dies again at once would die for ever."""


class Succession:
    """Gives out at most `most` new clients within a minute; none without a `make_client`."""

    def __init__(
        self,
        make_client: Callable[[], EngineClient] | None = None,
        most: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = make_client
        self._clock = clock
        self._times: deque[float | None] = deque([None] * most, maxlen=most)  # of the last ones

    def next_client(self) -> EngineClient | None:
        """A client of an engine that is still to be started, or None: it ends here."""
        if self._make_client is None or not self._times:
            return None
        now, eldest = self._clock(), self._times[0]
        if eldest is not None and now - eldest < WINDOW_S:
            return None
        self._times.append(now)
        return self._make_client()
