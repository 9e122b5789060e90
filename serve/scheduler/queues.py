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
        self._heaps: dict[int, list[_Entry]] = {}  # by the most tokens their requests may have
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
        heap = self._heaps.setdefault(self._most_alike(request.num_tokens), [])
        heapq.heappush(heap, (request.place_in_line, ticket, request))
        heapq.heappush(self._by_arrival, (request.arrival_time, ticket, request))

    def peek(self, at_most: float = math.inf) -> Request | None:
        """The next to be served, or None; of those with at most so many tokens. Others of nearly as
        many may be left out, see `_most_alike`."""
        heaps = [heap for most, heap in self._heaps.items() if most <= at_most]
        heads = [head for head in map(self._head, heaps) if head is not None]
        return min(heads)[2] if heads else None

    def peek_short(self) -> Request | None:
        """The next to be served that is not long, or None."""
        return self.peek(self._long_above)

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
        num_entries = sum(map(len, self._heaps.values())) + len(self._by_arrival)
        if num_entries > 4 * len(self._ticket_of) + 64:
            self._sweep()

    def set_long_above(self, long_above: int) -> None:
        """Another length above which requests can be passed over; O(n)."""
        if long_above == self._long_above:
            return
        self._long_above = long_above
        self._sweep()

    def _most_alike(self, num_tokens: int) -> int:
        """The most tokens that a request can have to share a heap with one of so many: a quarter
        more at most, so that there are few heaps, and none has both short and long ones."""
        shift = max(0, num_tokens.bit_length() - 3)
        most = (((num_tokens >> shift) + 1) << shift) - 1
        return int(min(most, self._long_above)) if num_tokens <= self._long_above else most

    def _head(self, heap: list[_Entry]) -> _Entry | None:
        while heap:
            if self._ticket_of.get(heap[0][2]) == heap[0][1]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _sweep(self) -> None:
        entries = [e for heap in self._heaps.values() for e in heap]
        self._heaps = {}
        for entry in entries:
            if self._ticket_of.get(entry[2]) == entry[1]:
                self._heaps.setdefault(self._most_alike(entry[2].num_tokens), []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._by_arrival = [e for e in self._by_arrival if self._ticket_of.get(e[2]) == e[1]]
        heapq.heapify(self._by_arrival)
