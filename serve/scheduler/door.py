"""Who may wait and for how long: refusals at the door, deadlines behind it, and the queue's rate.

The rate is the one measure behind Retry-After and every estimated start.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from serve.errors import InvalidRequest, PromptTooLong, QueueFull
from serve.messages import AddRequest
from serve.scheduler.limits import SchedulerLimits, kv_tokens_at_most
from serve.scheduler.request import Request, RequestStatus

WINDOW = 64
"""Moves of the queue from which its rate is measured."""

MEMORY_S = 60.0
"""What the queue did longer ago than this, before it was empty, says nothing about today's."""


def check_fits(message: AddRequest, limits: SchedulerLimits, pool_tokens: int) -> None:
    """Refuse a request that could never finish, even alone.

    Raises PromptTooLong naming the limit, InvalidRequest for an empty prompt. The front normally
    refuses first, with the same limits; this is what keeps the queue from blocking for ever.
    """
    prompt, wanted = len(message.prompt_token_ids), message.sampling.max_tokens
    assert wanted is not None, f"max_tokens of {message.request_id} was not resolved"
    if prompt == 0:
        raise InvalidRequest("the prompt has no tokens.", param="prompt")
    sent = f"the prompt has {prompt} tokens and max_tokens is {wanted}"
    if prompt + wanted > limits.max_model_len:
        raise PromptTooLong(
            f"{sent}, together more than the {limits.max_model_len} tokens of context. "
            f"Shorten the prompt, lower max_tokens or raise --max-model-len."
        )
    if kv_tokens_at_most(prompt, wanted) > pool_tokens:
        raise PromptTooLong(
            f"{sent}, but the KV cache holds {pool_tokens} tokens in all. "
            f"Shorten the prompt, lower max_tokens or give the server a larger KV pool."
        )


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


class Deadlines:
    """A heap of those that may wait only so long: for their own timeout or the server's limit.

    Deadlines are for beginning: who has begun once, and was preempted, is never let down. Entries
    of the begun and the ended are dropped when they come up, or swept when they are too many.
    """

    def __init__(self, max_queue_time_s: float | None) -> None:
        self._max_queue_time_s = math.inf if max_queue_time_s is None else max_queue_time_s
        self.entries: list[tuple[float, int, Request]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        deadline = request.arrival_time + min(self._max_queue_time_s, request.timeout_s)
        if deadline == math.inf:
            return
        heapq.heappush(self.entries, (deadline, self._num_added, request))
        self._num_added += 1

    def take_expired(self, now: float) -> list[Request]:
        """Those whose time is up, each named once."""
        expired = []
        while self.entries and self.entries[0][0] < now:
            request = heapq.heappop(self.entries)[2]
            if self.may_expire(request):
                expired.append(request)
        return expired

    def sweep(self, num_waiting: int) -> None:
        """Forget entries of those that no longer wait, if they outnumber the `num_waiting`."""
        if len(self.entries) > 4 * num_waiting + 64:
            self.entries = [entry for entry in self.entries if self.may_expire(entry[2])]
            heapq.heapify(self.entries)

    def may_expire(self, request: Request) -> bool:
        """Whether it still waits for its first step."""
        return request.status is RequestStatus.WAITING and request.first_scheduled_time is None

    def is_own(self, request: Request) -> bool:
        """Whether the request's own timeout comes before the server's limit."""
        return request.timeout_s <= self._max_queue_time_s


def _are(number: int, what: str) -> str:
    return f"1 {what} is" if number == 1 else f"{number} {what}s are"
