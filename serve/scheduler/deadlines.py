"""When a request that has not begun is not worth beginning any more."""

from __future__ import annotations

import heapq
import math

from serve.scheduler.request import Request, RequestStatus


class Deadlines:
    """A heap of those that may wait only so long: for their own timeout or the server's limit.

    Deadlines are for beginning: who has begun once, and was preempted, is never let down. Entries
    of the begun and the ended are dropped when they come up, or swept when they are too many.
    """

    def __init__(self, max_queue_time_s: float | None) -> None:
        self._max_queue_time_s = math.inf if max_queue_time_s is None else max_queue_time_s
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        deadline = request.arrival_time + min(self._max_queue_time_s, request.timeout_s)
        if deadline == math.inf:
            return
        heapq.heappush(self._heap, (deadline, self._num_added, request))
        self._num_added += 1

    def take_expired(self, now: float) -> list[Request]:
        """Those whose time is up, each named once."""
        expired = []
        while self._heap and self._heap[0][0] < now:
            request = heapq.heappop(self._heap)[2]
            if self.may_expire(request):
                expired.append(request)
        return expired

    def sweep(self, num_waiting: int) -> None:
        """Forget entries of those that no longer wait, if they outnumber the `num_waiting`."""
        if len(self._heap) > 4 * num_waiting + 64:
            self._heap = [entry for entry in self._heap if self.may_expire(entry[2])]
            heapq.heapify(self._heap)

    def may_expire(self, request: Request) -> bool:
        """Whether it still waits for its first step."""
        return request.status is RequestStatus.WAITING and request.first_scheduled_time is None

    def is_own(self, request: Request) -> bool:
        """Whether the request's own timeout comes before the server's limit."""
        return request.timeout_s <= self._max_queue_time_s
