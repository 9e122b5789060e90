"""Control messages to the engine, who waits for each answer, and what must be said again."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from serve.engine.client import EngineClient
from serve.engine.setup import EngineSetup
from serve.errors import EngineDead, InvalidRequest, QueueFull
from serve.messages import Control, ControlResult

MAX_OPEN = 256
"""Calls that may be open; a slow or silent engine must not let them pile up."""

Answer = asyncio.Future[ControlResult]


class ControlCalls:
    """The calls that are open; lives on the engine's event loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ids = itertools.count()
        self._open: dict[int, tuple[Control, Answer]] = {}
        self._setup = EngineSetup()

    async def ask(self, name: str, args: dict[str, Any]) -> Any:
        """The engine's answer. Raises InvalidRequest for what it refuses, QueueFull when too many
        are open already, EngineDead when it dies meanwhile and no other engine follows."""
        if len(self._open) >= MAX_OPEN:
            raise QueueFull(
                f"{len(self._open)} questions to the engine wait for their answers. Try again "
                "later.",
                retry_after_s=1.0,
            )
        answer = value_of(await self._send(name, args))
        self._setup.note(name, args, answer)
        return answer

    def answered(self, result: ControlResult) -> None:
        """Hand an answer to whoever still waits for it."""
        _, answer = self._open.pop(result.call_id, (None, None))
        if answer is not None and not answer.done():
            answer.set_result(result)

    def repeat(self) -> list[tuple[str, dict[str, Any], Answer]]:
        """Tell a new engine all that was set in the one before it, and ask it what is open (every
        call shows or sets: it may be made twice). What was set, with the answers to come."""
        open_calls = [call for call, answer in self._open.values() if not answer.done()]
        repeated = [(name, args, self._send(name, args)) for name, args in self._setup.calls()]
        for call in open_calls:
            self._client.send(call)
        return repeated

    def fail(self, death: EngineDead) -> None:
        """No more answers will come."""
        waiting, self._open = self._open, {}
        for _, answer in waiting.values():
            if not answer.done():
                answer.set_exception(type(death)(*death.args))

    def _send(self, name: str, args: dict[str, Any]) -> Answer:
        call = Control(next(self._ids), name, args)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._open[call.call_id] = call, answer
        self._client.send(call)
        return answer


def value_of(result: ControlResult) -> Any:
    """What the engine answered. Raises InvalidRequest for what it refused."""
    if result.error is not None:
        raise InvalidRequest(result.error, param=result.param)
    return result.value
