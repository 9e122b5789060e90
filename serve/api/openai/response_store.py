"""Answers of `/v1/responses` kept in memory, so that later requests can go on from them.

A conversation is kept as the JSON of its items, so that what is counted is what is held. How many
answers are kept, their bytes and their age are limited by flags; who asks for one that had to go is
told so.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from serve.api.errors import NoSuchItem, NotStored
from serve.config import ServerConfig
from serve.errors import QueueFull

# Beside the texts: Python's objects and table entries, measured and rounded up.
RESPONSE_OVERHEAD_BYTES = 1000
ITEM_OVERHEAD_BYTES = 450
MAX_GONE = 4096
"""Ids of which we still know why they are gone."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredItem:
    """One item of a conversation. Answers that go on from each other share it.

    `is_ours`: the server made the id, so that it means one item only and can be referred to.
    `is_system`: it instructs, and stays when others have to make room.
    """

    id: str
    json: bytes
    is_ours: bool
    is_system: bool = False

    @property
    def num_bytes(self) -> int:
        """What it takes to keep."""
        return len(self.json) + len(self.id) + ITEM_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it was sent, and the conversation up to and with it.

    `given` leaves out the instructions, which belong to one request alone. `cuts`: how the text was
    cut when it was streamed (see `responses_events`); None if it was not.
    """

    given: tuple[StoredItem, ...]
    said: tuple[StoredItem, ...]
    answer: bytes
    cuts: bytes | None = None

    @property
    def items(self) -> tuple[StoredItem, ...]:
        """The whole conversation."""
        return self.given + self.said

    @property
    def own_bytes(self) -> int:
        """What it takes to keep beside its items."""
        num_items = len(self.given) + len(self.said)
        return RESPONSE_OVERHEAD_BYTES + len(self.answer) + len(self.cuts or b"") + 8 * num_items


@dataclass(slots=True)
class _Entry:
    response: StoredResponse
    used_at: float


class ResponseStore:
    """The most recently used answers within the limits; the least recently used go first."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._num_bytes = 0
        self._stored: OrderedDict[str, _Entry] = OrderedDict()
        self._holders: Counter[StoredItem] = Counter()  # how many answers hold an item
        self._items: dict[str, StoredItem] = {}  # those with ids of ours
        self._gone: OrderedDict[str, str] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return self._num_bytes

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep an answer, at others' expense if need be; not one that alone is too large."""
        config = self._config
        size = response.own_bytes + sum(item.num_bytes for item in response.items)
        self._drop_expired()
        if size > config.max_stored_bytes:
            self._remember_gone(response_id, f"its {size} bytes are too many ({self._limits()})")
            return
        self._stored[response_id] = _Entry(response, self._clock())
        self._num_bytes += response.own_bytes
        for item in response.items:
            self._hold(item)
        while len(self._stored) > config.max_stored_responses or (
            self._num_bytes > config.max_stored_bytes
        ):
            self._drop(next(iter(self._stored)), f"others needed its place ({self._limits()})")

    def get(self, response_id: str, param: str = "response_id") -> StoredResponse:
        """The answer, which counts as used. Raises NotStored for what `param` names, saying why."""
        self._drop_expired()
        entry = self._stored.get(response_id)
        if entry is None:
            raise NotStored(self._why_not(response_id), param=param)
        entry.used_at = self._clock()
        self._stored.move_to_end(response_id)
        return entry.response

    def item(self, item_id: str, param: str) -> StoredItem:
        """An item of a kept conversation, by the id that the server gave it. Raises NoSuchItem."""
        self._drop_expired()
        if item_id not in self._items:
            raise NoSuchItem(
                f"No item {item_id[:100]!r} is stored here: its response was not kept (store: "
                f"false), was deleted, or had to go ({self._limits()}). Send the item itself.",
                param=param,
            )
        return self._items[item_id]

    def delete(self, response_id: str) -> None:
        """Forget an answer. Raises NotStored."""
        self.get(response_id)
        self._drop(response_id, "it was deleted")

    def _hold(self, item: StoredItem) -> None:
        self._holders[item] += 1
        if self._holders[item] == 1:
            self._num_bytes += item.num_bytes
            if item.is_ours:
                self._items[item.id] = item

    def _let_go(self, item: StoredItem) -> None:
        self._holders[item] -= 1
        if self._holders[item] == 0:
            del self._holders[item]
            self._num_bytes -= item.num_bytes
            if item.is_ours:
                del self._items[item.id]

    def _drop_expired(self) -> None:
        ttl_s, now = self._config.stored_response_ttl, self._clock()
        while self._stored:
            oldest = next(iter(self._stored))
            if self._stored[oldest].used_at + ttl_s >= now:
                return
            self._drop(oldest, f"nobody used it for {ttl_s:g} s (--stored-response-ttl)")

    def _drop(self, response_id: str, why: str) -> None:
        response = self._stored.pop(response_id).response
        self._num_bytes -= response.own_bytes
        for item in response.items:
            self._let_go(item)
        self._remember_gone(response_id, why)

    def _remember_gone(self, response_id: str, why: str) -> None:
        self._gone[response_id] = why
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _why_not(self, response_id: str) -> str:
        name = repr(response_id[:100])
        if response_id in self._gone:
            return f"The response {name} is not kept any more: {self._gone[response_id]}."
        return f"No response {name} is stored here."

    def _limits(self) -> str:
        config = self._config
        return (
            f"--max-stored-responses {config.max_stored_responses}, "
            f"--max-stored-bytes {config.max_stored_bytes}"
        )


class BackgroundResponses:
    """Answers that are being made while nobody waits for them. Owns their tasks."""

    def __init__(self, max_tasks: int) -> None:
        self._max_tasks = max_tasks
        self._begun: dict[str, StoredResponse] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check_room(self) -> None:
        """Raises QueueFull when no more can be begun."""
        if len(self._tasks) >= self._max_tasks:
            raise QueueFull(
                f"{self._max_tasks} background responses are being made already "
                "(--max-background-responses). Wait until some have ended.",
                retry_after_s=1.0,
            )

    def start(
        self, response_id: str, begun: StoredResponse, work: Coroutine[Any, Any, None]
    ) -> None:
        """Do `work`, which stores the answer; `begun` is the answer until then."""
        task = self._tasks[response_id] = asyncio.create_task(work)
        self._begun[response_id] = begun
        task.add_done_callback(lambda _: self._forget(response_id))

    def begun(self, response_id: str) -> StoredResponse | None:
        """An answer that has not ended."""
        return self._begun.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """End the work and wait until it has stored what came of it."""
        task = self._tasks[response_id]
        task.cancel()
        await asyncio.wait({task})

    def _forget(self, response_id: str) -> None:
        del self._begun[response_id], self._tasks[response_id]
