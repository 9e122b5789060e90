"""Control messages to the engine, and who waits for each answer."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from serve.engine.client import EngineClient
from serve.errors import EngineDead, InvalidRequest
from serve.messages import Control, ControlResult

Answer = asyncio.Future[ControlResult]


class ControlCalls:
    """The calls that are open; lives on the engine's event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client: EngineClient | None = client  # None while there is no engine
        self._ids = itertools.count()
        self._open: dict[int, tuple[Control, Answer]] = {}

    def send(self, name: str, args: dict[str, Any]) -> Answer:
        """Ask something; the answer comes later, or EngineDead."""
        call = Control(next(self._ids), name, args)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._open[call.call_id] = call, answer
        if self._client is not None:
            self._client.send(call)
        return answer

    async def ask(self, name: str, args: dict[str, Any]) -> Any:
        """The engine's answer. Raises InvalidRequest for what it refuses, EngineDead when it dies
        meanwhile."""
        result = await self.send(name, args)
        if result.error is not None:
            raise InvalidRequest(result.error, param=result.param)
        return result.value

    def answered(self, result: ControlResult) -> None:
        """Hand an answer to whoever still waits for it."""
        _, answer = self._open.pop(result.call_id, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(result)

    def hold(self) -> None:
        """The engine is away: what is open, and what is asked from now on, waits for the next."""
        self._client = None

    def resume(self, client: EngineClient) -> None:
        """Ask another engine what is open. It may be asked twice: every call shows or sets."""
        self._client = client
        self._open = {i: (call, a) for i, (call, a) in self._open.items() if not a.done()}
        for call, _ in self._open.values():
            client.send(call)

    def fail(self, reason: str) -> None:
        """No more answers will come."""
        waiting, self._open = self._open, {}
        for _, answer in waiting.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
