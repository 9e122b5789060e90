"""Requests that wait, in the order they will be served."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from serve.scheduler.request import Request

_Entry = tuple[tuple[int, bool, float, int], int, Request]


class RequestQueue:
    """A heap by `Request.place_in_line`.

    Within one level, whoever was preempted comes back before anything new starts. Those with more
    than `long_above` tokens can be passed over.
    Removal marks the entry dead, and the dead are swept when they outnumber the living, so every
    operation is O(log n) or better however many wait.
    """

    def __init__(self, long_above: int | None = None) -> None:
        self._long_above = math.inf if long_above is None else long_above
        self._short: list[_Entry] = []
        self._long: list[_Entry] = []
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
        heap = self._long if request.num_tokens > self._long_above else self._short
        heapq.heappush(heap, (request.place_in_line, ticket, request))
        heapq.heappush(self._by_arrival, (request.arrival_time, ticket, request))

    def peek(self) -> Request | None:
        """The next to be served, or None."""
        heads = [head for head in (self._head(self._short), self._head(self._long)) if head]
        return min(heads)[2] if heads else None

    def peek_short(self) -> Request | None:
        """The next to be served that is not long, or None."""
        head = self._head(self._short)
        return None if head is None else head[2]

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
        num_entries = len(self._short) + len(self._long) + len(self._by_arrival)
        if num_entries > 4 * len(self._ticket_of) + 64:
            self._sweep()

    def set_long_above(self, long_above: int) -> None:
        """Another length above which requests can be passed over; O(n)."""
        if long_above == self._long_above:
            return
        self._long_above = long_above
        self._sweep()
        entries = self._short + self._long
        self._short = [e for e in entries if e[2].num_tokens <= long_above]
        self._long = [e for e in entries if e[2].num_tokens > long_above]
        heapq.heapify(self._short)
        heapq.heapify(self._long)

    def _head(self, heap: list[_Entry]) -> _Entry | None:
        while heap:
            if self._ticket_of.get(heap[0][2]) == heap[0][1]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _sweep(self) -> None:
        self._short = [e for e in self._short if self._ticket_of.get(e[2]) == e[1]]
        self._long = [e for e in self._long if self._ticket_of.get(e[2]) == e[1]]
        self._by_arrival = [e for e in self._by_arrival if self._ticket_of.get(e[2]) == e[1]]
        for heap in (self._short, self._long):
            heapq.heapify(heap)
        heapq.heapify(self._by_arrival)
