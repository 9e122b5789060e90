"""A server over the real engine core and the fake device, stepping only when the test says so."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from serve.config import EngineConfig, ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import core_over
from serve.messages import EngineDied, EngineReady, FromEngine, StepOutputs, ToEngine
from tests.api.conftest import MODEL, Server
from tests.api.scripted import TEMPLATE
from tests.fakes import FakeExecutor


class SteppedClient:
    """EngineClient. Messages are taken in at once; steps wait for `allow`."""

    def __init__(self, executor: FakeExecutor, config: EngineConfig) -> None:
        self._to_engine: deque[ToEngine] = deque()
        self._from_engine: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self._num_allowed = 0
        self._death: EngineDied | None = None
        self.core, ready = core_over(executor, config, self, self)
        self._ready = replace(ready, vocab_size=1000)  # the fake device takes any prompt

    async def start(self) -> EngineReady:
        return self._ready

    def send(self, message: ToEngine | FromEngine) -> None:
        """Both ways: the core's outbox has the same name for it."""
        box = self._to_engine if isinstance(message, ToEngine) else self._from_engine
        box.append(message)  # type: ignore[arg-type]
        self._news.set()

    def drain(self, block: bool) -> list[ToEngine]:
        return []

    async def receive(self) -> FromEngine:
        while not self._from_engine:
            if self._death is not None:
                return self._death
            while self._to_engine:
                self.core.handle(self._to_engine.popleft())
            if self._num_allowed and self.core.has_work():
                self._num_allowed -= 1
                deltas, scheduler = self.core.step(), self.core.scheduler
                self.send(StepOutputs(deltas, scheduler.stats(), scheduler.clock()))
            elif not self._from_engine:
                self._news.clear()
                await self._news.wait()
        return self._from_engine.popleft()

    def seen_at(self) -> float:
        return time.monotonic()

    async def close(self) -> None:
        self.die("closed")

    def allow(self, num_steps: int) -> None:
        """Let so many steps happen (on the event loop)."""
        self._num_allowed += num_steps
        self._news.set()

    def die(self, reason: str) -> None:
        """End the engine (on the event loop)."""
        self._death = EngineDied(reason)
        self._news.set()

    @property
    def num_queued(self) -> int:
        """Requests that wait or are swapped out."""
        roster = self.core.scheduler.roster
        return len(roster.waiting) + len(roster.swapped)


@contextmanager
def stepped_server(
    executor: FakeExecutor, config: EngineConfig
) -> Iterator[tuple[Server, SteppedClient]]:
    """A running server for the block."""
    server = Server(ServerConfig(), chat_template=TEMPLATE)
    client = SteppedClient(executor, config)
    server.engine = AsyncEngine(client, server.tokenizer, server.metrics, names=(MODEL,))
    server.start()
    try:
        yield server, client
    finally:
        server.stop()
