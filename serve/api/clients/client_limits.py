"""Holding clients to their limits: at the door, before anything reaches the engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.api.clients.client import Client
from serve.errors import InvalidRequest, RateLimited

MAX_STRANGERS = 4096
"""Clients by a name of their own making that are told apart; any more share one account."""
SWEEP_INTERVAL_S = 10.0
"""How often, at most, those who owe nothing are looked for among them."""
WEIGHT_OF_NEWEST = 0.2
"""Share of the newest generation in a client's means."""
THE_REST = "the rest"
_TINY = 1e-6  # of a request or token: what sums of fractions may lack

OnRefusal = Callable[[str, str], None]
"""Is told the client's name and the limit that refused it."""


@dataclass(slots=True)
class Lease:
    """One HTTP request's place among its client's; changed only by ClientLimits."""

    usage: _Usage | None  # None: there is nothing to count
    num_generations: int
    num_reserved: int  # tokens that it may generate, charged beforehand
    begun_at: float
    is_open: bool = True


class ClientLimits:
    """Counts what each client has running, and what it used of late.

    A rate is a bucket that fills evenly and holds one minute's worth. A request is let in while
    there is anything in the bucket, and then takes its prompt and what it may generate, if need be
    on credit; what it did not generate comes back when it ends. So no request is too large for
    ever, however many come at once only the last of them overdraws, and over time no client uses
    more than its rate.
    """

    def __init__(self, on_refusal: OnRefusal, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_refusal = on_refusal
        self._clock = clock
        self._known: dict[str, _Usage] = {}
        self._strangers: dict[str, _Usage] = {}
        self._next_sweep = -math.inf

    def enter(
        self,
        client: Client,
        num_generations: int,
        num_prompt_tokens: int,
        max_tokens: int | None = None,
    ) -> Lease:
        """Let a request in; `leave` must follow. Raises RateLimited, which names the limit.

        `max_tokens` is what each generation may have; None: as many as they have on average.
        """
        now, limits = self._clock(), client.limits
        if not limits.limits_anything:
            return Lease(None, num_generations, 0, now)
        usage = self._usage_of(client, now)
        if limits.max_concurrent is not None:
            self._check_concurrency(client, usage, num_generations, limits.max_concurrent)
        self._check_rates(client, usage, now)
        each = round(usage.mean_tokens) if max_tokens is None else max_tokens
        num_reserved = num_generations * each
        usage.num_running += num_generations
        usage.num_reserved += num_reserved
        usage.requests.take(1, now)
        usage.tokens.take(num_prompt_tokens + num_reserved, now)
        return Lease(usage, num_generations, num_reserved, now)

    def leave(self, lease: Lease, num_generated_tokens: int) -> None:
        """A request is over, however it ended. Does nothing the second time."""
        usage = lease.usage
        if usage is None or not lease.is_open:
            return
        lease.is_open = False
        now = self._clock()
        usage.num_running -= lease.num_generations
        usage.num_reserved -= lease.num_reserved
        usage.tokens.take(num_generated_tokens - lease.num_reserved, now)
        usage.mean_s = _mean(usage.mean_s, now - lease.begun_at)
        usage.mean_tokens = _mean(usage.mean_tokens, num_generated_tokens / lease.num_generations)

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
            raise self._refusal(client, "max_concurrent", what, usage.seconds_until_one_ends())

    def _check_rates(self, client: Client, usage: _Usage, now: float) -> None:
        limits = client.limits
        wait_s = usage.requests.seconds_until_open(now)
        if wait_s > 0:
            what = f"requests_per_minute is {limits.requests_per_minute:g}, and it is used up"
            raise self._refusal(client, "requests_per_minute", what, wait_s)
        wait_s = usage.tokens.seconds_until_open(now)
        if wait_s > 0:
            what = f"tokens_per_minute is {limits.tokens_per_minute:g}, and it is used up"
            if usage.tokens.seconds_until_open(now, returned=usage.num_reserved) == 0:
                what += " if what runs generates all it may"
                wait_s = min(wait_s, usage.seconds_until_one_ends())
            raise self._refusal(client, "tokens_per_minute", what, wait_s)

    def _refusal(self, client: Client, limit: str, what: str, wait_s: float) -> RateLimited:
        self._on_refusal(client.label, limit)
        wait_s = float(max(1, math.ceil(wait_s)))
        return RateLimited(
            f"The limit of {client.label} is reached: {what}. Try again in {wait_s:.0f} s.",
            retry_after_s=wait_s,
        )

    def _usage_of(self, client: Client, now: float) -> _Usage:
        table, account = (self._known if client.is_known else self._strangers), client.account
        if account not in table:
            if not client.is_known and len(table) >= MAX_STRANGERS:
                self._sweep(now)
                if len(table) >= MAX_STRANGERS:
                    account = THE_REST
            limits = client.limits
            new = _Usage(_Bucket(limits.requests_per_minute), _Bucket(limits.tokens_per_minute))
            return table.setdefault(account, new)
        return table[account]

    def _sweep(self, now: float) -> None:
        """Forget strangers who owe nothing: it takes a while, so not at every newcomer's."""
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            settled = [name for name, usage in self._strangers.items() if usage.is_settled(now)]
            for name in settled:
                del self._strangers[name]


class _Bucket:
    """What is left of a rate per minute; None: of an unlimited one."""

    __slots__ = ("_filled_at", "_left", "_most")

    def __init__(self, per_minute: float | None) -> None:
        self._most = math.inf if per_minute is None else per_minute
        self._left = self._most
        self._filled_at = -math.inf

    def take(self, amount: float, now: float) -> None:
        """Use some, if need be more than there is; or give some back."""
        self._fill(now)
        self._left = min(self._most, self._left - amount)

    def seconds_until_open(self, now: float, returned: float = 0) -> float:
        """Until there is something left; 0 when there is, or would be if some were given back."""
        self._fill(now)
        least = min(1.0, self._most)  # less than one request or token is none
        left = self._left + returned
        return 0.0 if left >= least - _TINY else 60 * (least - left) / self._most

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
    """Changed only by ClientLimits. Means are of its generations."""

    requests: _Bucket
    tokens: _Bucket
    num_running: int = 0
    num_reserved: int = 0  # tokens
    mean_s: float = 0.0
    mean_tokens: float = 0.0

    def seconds_until_one_ends(self) -> float:
        """As long as they have taken on average."""
        return self.mean_s / max(1, self.num_running)

    def is_settled(self, now: float) -> bool:
        """Whether forgetting it changes nothing."""
        return self.num_running == 0 and self.requests.is_full(now) and self.tokens.is_full(now)


def _mean(of_late: float, newest: float) -> float:
    return of_late + WEIGHT_OF_NEWEST * (newest - of_late) if of_late else newest
