"""Requests that wait, in the order they will be served."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from serve.scheduler.request import Request

_Entry = tuple[tuple[int, int, int], int, Request]


class RequestQueue:
    """A heap: begun requests before those that never ran, then by `Request.order`.

    Within one priority, that is: whoever was preempted comes back before anything new starts.
    Removal marks the entry dead, and the dead are swept when they outnumber the living, so every
    operation is O(log n) or better however many wait.
    """

    def __init__(self) -> None:
        self._by_order: list[_Entry] = []
        self._by_arrival: list[tuple[float, int, Request]] = []
        self._ticket_of: dict[Request, int] = {}  # the live entry of each request
        self._next_ticket = 0
        self.num_tokens = 0  # of all queued requests together

    def __len__(self) -> int:
        return len(self._ticket_of)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._ticket_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._ticket_of

    def push(self, request: Request) -> None:
        """Queue a request that is not queued."""
        assert request not in self._ticket_of, f"{request.request_id} is queued twice"
        ticket = self._next_ticket
        self._next_ticket += 1
        self._ticket_of[request] = ticket
        self.num_tokens += request.num_tokens
        priority, number = request.order
        never_ran = int(request.num_preemptions == 0)
        heapq.heappush(self._by_order, ((priority, never_ran, number), ticket, request))
        heapq.heappush(self._by_arrival, (request.arrival_time, ticket, request))

    def peek(self) -> Request | None:
        """The next to be served, or None."""
        while self._by_order:
            _, ticket, request = self._by_order[0]
            if self._ticket_of.get(request) == ticket:
                return request
            heapq.heappop(self._by_order)
        return None

    def earliest_arrival(self) -> float | None:
        """When the longest waiting one arrived, or None."""
        while self._by_arrival:
            arrival_time, ticket, request = self._by_arrival[0]
            if self._ticket_of.get(request) == ticket:
                return arrival_time
            heapq.heappop(self._by_arrival)
        return None

    def remove(self, request: Request) -> None:
        """Take out a queued request."""
        del self._ticket_of[request]
        self.num_tokens -= request.num_tokens
        if len(self._by_order) + len(self._by_arrival) > 4 * len(self._ticket_of) + 64:
            self._sweep()

    def _sweep(self) -> None:
        self._by_order = [e for e in self._by_order if self._ticket_of.get(e[2]) == e[1]]
        self._by_arrival = [e for e in self._by_arrival if self._ticket_of.get(e[2]) == e[1]]
        heapq.heapify(self._by_order)
        heapq.heapify(self._by_arrival)
