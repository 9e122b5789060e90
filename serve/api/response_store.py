"""Answers of `/v1/responses` kept in memory, so that later requests can go on from them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from serve.api.protocol.chat import Message

MAX_STORED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A conversation up to and with an answer, and the answer as it was sent.

    `messages` leave out the instructions, which belong to one request alone.
    """

    messages: list[Message]
    answer: bytes

    @property
    def num_bytes(self) -> int:
        """Roughly what it takes to keep."""
        return len(self.answer) + sum(len(str(message.content)) for message in self.messages)


class ResponseStore:
    """The most recently used answers within a limit of bytes; the least recently used go first."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep an answer, at others' expense if need be."""
        self._stored[response_id] = response
        self._num_bytes += response.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """The answer, or None if it was never kept, deleted or displaced."""
        if response_id in self._stored:
            self._stored.move_to_end(response_id)
        return self._stored.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Forget an answer; whether it was there."""
        response = self._stored.pop(response_id, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        return True


class BackgroundResponses:
    """Answers that are being made while nobody waits for them. Owns their tasks."""

    def __init__(self) -> None:
        self._begun: dict[str, bytes] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, response_id: str, begun: bytes, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, which stores the answer; `begun` is the answer until then."""
        task = self._tasks[response_id] = asyncio.create_task(work)
        self._begun[response_id] = begun
        task.add_done_callback(lambda _: self._forget(response_id))

    def begun(self, response_id: str) -> bytes | None:
        """An answer that has not ended."""
        return self._begun.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """End the work and wait until it has stored what came of it."""
        task = self._tasks[response_id]
        task.cancel()
        await asyncio.wait({task})

    def _forget(self, response_id: str) -> None:
        del self._begun[response_id], self._tasks[response_id]
