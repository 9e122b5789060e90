"""Control messages to the engine, and who waits for each answer."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from serve.engine.client import EngineClient
from serve.errors import EngineDead, InvalidRequest
from serve.messages import Control, ControlResult


class ControlCalls:
    """The calls that are open; lives on the engine's event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[ControlResult]] = {}

    async def ask(self, name: str, args: dict[str, Any]) -> Any:
        """The engine's answer. Raises InvalidRequest for what it refuses, EngineDead when it dies
        meanwhile."""
        call_id = next(self._ids)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._client.send(Control(call_id, name, args))
        try:
            result = await answer
        finally:
            del self._waiting[call_id]
        if result.error is not None:
            raise InvalidRequest(result.error, param=result.param)
        return result.value

    def answered(self, result: ControlResult) -> None:
        """Hand an answer to whoever still waits for it."""
        answer = self._waiting.get(result.call_id)
        if answer is not None and not answer.done():
            answer.set_result(result)

    def fail(self, reason: str) -> None:
        """No more answers will come."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
