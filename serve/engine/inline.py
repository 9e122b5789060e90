"""The engine core in the caller's own process and thread: for offline use and for tests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from serve.engine.core import EngineCore, Inbox, Outbox
from serve.errors import EngineDead
from serve.messages import EngineDied, EngineReady, FromEngine, ToEngine

CoreBuilder = Callable[[Inbox, Outbox], tuple[EngineCore, EngineReady]]


class InlineClient:
    """An EngineClient that runs a step of the core whenever someone waits for a message.

    A step holds up the event loop while it runs: right for one caller who wants the answer anyway,
    wrong for a server.
    """

    def __init__(self, build: CoreBuilder) -> None:
        self._build = build
        self._core: EngineCore | None = None
        self._mail = _Mail()
        self._sent = asyncio.Event()
        self._death: EngineDied | None = None

    async def start(self) -> EngineReady:
        """Build the core. Raises what building raises."""
        self._core, ready = self._build(self._mail, self._mail)
        return ready

    def send(self, message: ToEngine) -> None:
        """Leave a message for the next step."""
        self._mail.to_engine.append(message)
        self._sent.set()

    async def receive(self) -> FromEngine:
        """Step until the core says something."""
        while not self._mail.from_engine:
            await asyncio.sleep(0)  # readers and senders have their turn between steps
            if self._death is not None:
                return self._death
            assert self._core is not None, "start() comes first"
            if self._mail.to_engine or self._core.has_work():
                self._turn(self._core)
            else:
                self._sent.clear()
                await self._sent.wait()
        return self._mail.from_engine.popleft()

    def seen_at(self) -> float:
        """Now: whoever asks is the engine."""
        return time.monotonic()

    async def close(self) -> None:
        """Free the device."""
        if self._core is not None:
            if self._death is None:
                self._core.keep_prefixes()
            self._core.close()
            self._core = None
        self._death = EngineDied("the engine was closed.")
        self._sent.set()

    def _turn(self, core: EngineCore) -> None:
        try:
            core.turn()
        except EngineDead as error:
            self._death = EngineDied(str(error))


class _Mail:
    """Both directions of an inline engine's messages; the core's Inbox and Outbox."""

    def __init__(self) -> None:
        self.to_engine: deque[ToEngine] = deque()
        self.from_engine: deque[FromEngine] = deque()

    def drain(self, block: bool) -> list[ToEngine]:
        """Everything that was sent. The caller sees to it that there is no need to block."""
        assert not block or self.to_engine
        messages = list(self.to_engine)
        self.to_engine.clear()
        return messages

    def send(self, message: FromEngine) -> None:
        """Put a message where `receive` finds it."""
        self.from_engine.append(message)
