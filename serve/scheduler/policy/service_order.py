"""Who is served before whom, decided once, when a request arrives."""

from __future__ import annotations

from dataclasses import dataclass

from serve.messages import AddRequest
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.request import Order, Request

MAX_IDLE_CLIENTS = 1024


class ServiceOrder:
    """Gives each request its place: (level, virtual start, arrival number), lower is first.

    fcfs: by number alone.

    priority: the level is the request's priority, plus one for every full `priority_aging_s` that
    the clock shows at its arrival. So a request is served before one of the next lower priority
    number that arrives that much later, and whatever arrives in future cannot overtake it for ever.

    fair: by the virtual start of start-time fair queueing (Goyal, Vin and Cheng, 1996), with tokens
    for work. A client's requests are laid end to end in virtual time, each as long as its tokens
    divided by the client's weight, and no earlier than the newest start that has been served. So a
    client that asks for little is served next, whatever the others have queued, and no client saves
    up service by idling. `max_tokens` is charged, and what was not generated is given back.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._policy = limits.policy
        self._aging_s = limits.priority_aging_s
        self._clients: dict[str, _Client] = {}
        self._virtual_time = 0.0
        self._num_arrived = 0
        self._base_level = 0
        self._highest_level = 0
        self._since = 0.0  # levels count from this time
        self._last_arrival = 0.0
        self._num_open = 0  # requests of clients

    def place(self, message: AddRequest) -> Order:
        """The place of a new request, which `ended` must follow."""
        number = self._num_arrived
        self._num_arrived += 1
        self._last_arrival = message.arrival_time
        virtual_start = self._virtual_start(message)
        level = self._base_level
        if self._policy == "priority":
            level += self._priority_level(message)
        self._highest_level = max(self._highest_level, level)
        return level, virtual_start if self._policy == "fair" else 0.0, number

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Another policy for those who arrive from now on: they come after those who are here,
        unless they are more urgent, and no client owes anything."""
        if (self._policy, self._aging_s) == (limits.policy, limits.priority_aging_s):
            return
        self._policy, self._aging_s = limits.policy, limits.priority_aging_s
        self._base_level = self._highest_level + 1
        self._since = self._last_arrival
        for client in self._clients.values():
            client.virtual_end = self._virtual_time

    def started(self, request: Request) -> None:
        """A request has its first step."""
        self._virtual_time = max(self._virtual_time, request.order[1])

    def ended(self, request: Request) -> None:
        """A request is over, finished or not."""
        client = self._clients[request.client]
        num_unused = request.max_num_tokens - len(request.token_ids)
        client.virtual_end -= num_unused / request.weight
        client.num_open -= 1
        self._num_open -= 1
        if self._num_open == 0:  # all are equal again
            self._clients.clear()

    def _forget_idle(self) -> None:
        """Drop those who have nothing here and would begin at the virtual time anyway."""
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.num_open or client.virtual_end > self._virtual_time
        }

    def _priority_level(self, message: AddRequest) -> int:
        if not self._aging_s:
            return message.priority
        return message.priority + int((message.arrival_time - self._since) // self._aging_s)

    def _virtual_start(self, message: AddRequest) -> float:
        if message.client not in self._clients and len(self._clients) >= MAX_IDLE_CLIENTS:
            self._forget_idle()
        client = self._clients.setdefault(message.client, _Client())
        start = max(self._virtual_time, client.virtual_end)
        num_tokens = len(message.prompt_token_ids) + (message.sampling.max_tokens or 0)
        client.virtual_end = start + num_tokens / message.weight
        client.num_open += 1
        self._num_open += 1
        return start


@dataclass(slots=True)
class _Client:
    """Changed by ServiceOrder."""

    virtual_end: float = 0.0
    num_open: int = 0
