"""Who is where: waiting, swapped out or running."""

from __future__ import annotations

import math
from bisect import insort
from operator import attrgetter

from serve.messages import FinishReason
from serve.scheduler.queues import RequestQueue
from serve.scheduler.request import Request, RequestStatus


class Roster:
    """Every live request is in exactly one place, and its status says which.

    Those that run have a row in the worker; `released` collects the rows that are to be given back.
    """

    def __init__(self, long_above: int) -> None:
        self.requests: dict[str, Request] = {}  # all but ended ones
        self.waiting = RequestQueue(long_above)
        self.swapped = RequestQueue()
        self.running: list[Request] = []  # by Request.order
        self._released: list[str] = []
        self._any_ended = False  # whether `running` still holds one that has ended

    def join(self, request: Request) -> None:
        """A new request waits."""
        assert request.request_id not in self.requests, f"{request.request_id} is already here"
        self.requests[request.request_id] = request
        self.waiting.push(request)

    @property
    def num_queued(self) -> int:
        """Requests without a row: those that wait, and those that are swapped out."""
        return len(self.requests) - len(self.running)

    def next_in_line(self, *, may_start_long: bool) -> Request | None:
        """Swapped-out requests go first, except before more urgent ones. Nobody overtakes.

        Without `may_start_long`, waiting requests with long prompts are passed over.
        """
        swapped = self.swapped.peek()
        waiting = self.waiting.peek() if may_start_long else self.waiting.peek_short()
        if swapped is None or (waiting is not None and waiting.order[0] < swapped.order[0]):
            return waiting
        return swapped

    def next_shorter(self, first: Request, most: int) -> Request | None:
        """One with at most `most` tokens that may overtake `first`, which is next in line and waits
        for the end of another's prompt. Nobody overtakes the more urgent, or who had begun."""
        if first.first_scheduled_time is not None:
            return None
        short = self.waiting.peek(most)
        return short if short is not None and short.order[0] == first.order[0] else None

    def num_ahead(self, request: Request, most: float = math.inf) -> int:
        """Queued requests that are served before this queued one, of those with at most `most`
        tokens. O(n): for a look in."""
        level, place = request.order[0], request.place_in_line
        if request.status is RequestStatus.SWAPPED:
            same, other = self.swapped, [r.order[0] < level for r in self.waiting]
        else:
            same, other = self.waiting, [r.order[0] <= level for r in self.swapped]
        ahead = [r for r in same if r.place_in_line < place and r.num_tokens <= most]
        return len(ahead) + sum(other)

    def admit(self, request: Request) -> None:
        """A queued request runs, in its place in the order."""
        self._leave(request)
        request.move_to(RequestStatus.RUNNING)
        insort(self.running, request, key=attrgetter("order"))

    def queue(self, request: Request, status: RequestStatus) -> None:
        """A running or swapped-out request is WAITING or SWAPPED from now on."""
        self._leave(request)
        request.move_to(status)
        queue = self.waiting if status is RequestStatus.WAITING else self.swapped
        queue.push(request)

    def verified(self, request: Request, num_rejected: int) -> None:
        """A request's drafts are verified; a queued one lies there by its number of tokens."""
        queue = self._queue_of(request)
        if queue is not None:
            queue.remove(request)
        request.verified(num_rejected)
        if queue is not None:
            queue.push(request)

    def end(self, request: Request, reason: FinishReason) -> None:
        """A request is over. A running one stays in `running` until `drop_ended`."""
        if request.status is RequestStatus.RUNNING:
            self._released.append(request.request_id)
            self._any_ended = True
        else:
            self._leave(request)
        request.finish(reason)
        del self.requests[request.request_id]

    def drop_ended(self) -> None:
        """Take the ended out of `running`, all at once."""
        if self._any_ended:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
            self._any_ended = False

    def release_again(self, request_ids: list[str]) -> None:
        """Rows that a failed step may not have given back. Who has got one since keeps it."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                self._released.append(request_id)

    def has_released(self) -> bool:
        """Whether there are rows to give back."""
        return bool(self._released)

    def rows_to_release(self) -> list[str]:
        """A copy of what `take_released` would hand over."""
        return list(self._released)

    def take_released(self) -> list[str]:
        """Hand over the rows to give back."""
        released, self._released = self._released, []
        return released

    def _leave(self, request: Request) -> None:
        queue = self._queue_of(request)
        if queue is None:
            self.running.remove(request)
        else:
            queue.remove(request)

    def _queue_of(self, request: Request) -> RequestQueue | None:
        """None for one that runs."""
        if request.status is RequestStatus.RUNNING:
            return None
        return self.waiting if request.status is RequestStatus.WAITING else self.swapped
