"""Holding clients to their limits: at the door, before anything reaches the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve.api.clients import Client
from serve.errors import InvalidRequest, RateLimited

MAX_IDLE_CLIENTS = 4096
"""Clients that are remembered although nothing of theirs runs, before the settled are dropped."""
WEIGHT_OF_NEWEST = 0.2
"""Share of the newest generation in a client's mean duration."""

OnRefusal = Callable[[str, str], None]
"""Is told the client's name and the limit that refused it."""


@dataclass(slots=True)
class Lease:
    """One HTTP request's place among its client's; changed only by ClientLimits."""

    client: Client
    num_generations: int
    begun_at: float
    is_open: bool = True


class ClientLimits:
    """Counts what each client has running, and what it used of late.

    A rate is a bucket that fills evenly and holds one minute's worth. A request is let in while
    there is anything in the bucket, and then takes its prompt; what it generates is taken when it
    ends, if need be on credit. So nothing is refused for what it might use, no request is too large
    for ever, and over time no client uses more than its rate.
    """

    def __init__(self, on_refusal: OnRefusal, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_refusal = on_refusal
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def enter(self, client: Client, num_generations: int, num_prompt_tokens: int) -> Lease:
        """Let a request in; `leave` must follow. Raises RateLimited, which names the limit."""
        now = self._clock()
        limits = client.limits
        usage = self._usage_of(client, now)
        if limits.max_concurrent is not None:
            self._check_concurrency(client, usage, num_generations, limits.max_concurrent)
        for limit, bucket in (
            ("requests_per_minute", usage.requests),
            ("tokens_per_minute", usage.tokens),
        ):
            wait_s = bucket.seconds_until_open(now)
            if wait_s > 0:
                what = f"{limit} is {getattr(limits, limit):g}, and it is used up"
                raise self._refusal(client, limit, what, wait_s)
        usage.num_running += num_generations
        usage.requests.take(1, now)
        usage.tokens.take(num_prompt_tokens, now)
        return Lease(client, num_generations, now)

    def leave(self, lease: Lease, num_generated_tokens: int) -> None:
        """A request is over, however it ended. Does nothing the second time."""
        if not lease.is_open:
            return
        lease.is_open = False
        now = self._clock()
        usage = self._usage_of(lease.client, now)
        usage.num_running -= lease.num_generations
        usage.tokens.take(num_generated_tokens, now)
        newest = now - lease.begun_at
        usage.mean_s += WEIGHT_OF_NEWEST * (newest - usage.mean_s) if usage.mean_s else newest

    def _check_concurrency(
        self, client: Client, usage: _Usage, num_generations: int, most: int
    ) -> None:
        if num_generations > most:
            raise InvalidRequest(
                f"This request asks for {num_generations} completions at once; max_concurrent of "
                f"{client.label} is {most}. Ask for fewer.",
                param="n",
            )
        if usage.num_running + num_generations > most:
            what = f"max_concurrent is {most}, and {usage.num_running} of its generations run"
            wait_s = usage.mean_s / max(1, usage.num_running)
            raise self._refusal(client, "max_concurrent", what, wait_s)

    def _refusal(self, client: Client, limit: str, what: str, wait_s: float) -> RateLimited:
        self._on_refusal(client.label, limit)
        wait_s = float(max(1, math.ceil(wait_s)))
        return RateLimited(
            f"The limit of {client.label} is reached: {what}. Try again in {wait_s:.0f} s.",
            retry_after_s=wait_s,
        )

    def _usage_of(self, client: Client, now: float) -> _Usage:
        usage = self._usage.get(client.name)
        if usage is None:
            if len(self._usage) >= MAX_IDLE_CLIENTS:
                self._usage = {n: u for n, u in self._usage.items() if not u.is_settled(now)}
            limits = client.limits
            usage = _Usage(_Bucket(limits.requests_per_minute), _Bucket(limits.tokens_per_minute))
            self._usage[client.name] = usage
        return usage


class _Bucket:
    """What is left of a rate per minute; None: of an unlimited one."""

    __slots__ = ("_filled_at", "_left", "_most")

    def __init__(self, per_minute: float | None) -> None:
        self._most = math.inf if per_minute is None else per_minute
        self._left = self._most
        self._filled_at = -math.inf

    def take(self, amount: float, now: float) -> None:
        """Use some, if need be more than there is."""
        self._fill(now)
        self._left -= amount

    def seconds_until_open(self, now: float) -> float:
        """Until there is something left; 0 when there is."""
        self._fill(now)
        least = min(1.0, self._most)  # less than one request or token is none
        return 0.0 if self._left >= least else 60 * (least - self._left) / self._most

    def is_full(self, now: float) -> bool:
        """Whether nothing was used of late."""
        self._fill(now)
        return self._left == self._most

    def _fill(self, now: float) -> None:
        if self._left < self._most:
            self._left += (now - self._filled_at) * self._most / 60
            self._left = min(self._most, self._left)
        self._filled_at = now


@dataclass(slots=True)
class _Usage:
    """Changed only by ClientLimits."""

    requests: _Bucket
    tokens: _Bucket
    num_running: int = field(default=0)
    mean_s: float = 0.0  # of its generations

    def is_settled(self, now: float) -> bool:
        """Whether forgetting it changes nothing."""
        return self.num_running == 0 and self.requests.is_full(now) and self.tokens.is_full(now)
