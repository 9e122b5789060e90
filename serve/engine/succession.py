"""Engines one after the other: when one dies, the next one is started in its place."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from serve.engine.client import EngineClient
from serve.errors import ConfigError, EngineDead
from serve.messages import (
    EngineDied,
    EngineLost,
    EngineReady,
    EngineStats,
    FromEngine,
    StepOutputs,
    ToEngine,
)

logger = logging.getLogger(__name__)

WINDOW_S = 60.0
"""Deaths count for so long: what dies again at once would die for ever."""


class Succession:
    """An EngineClient over one engine at a time; after at most `most` deaths within a minute there
    is another one.

    `receive` then says EngineLost and, when the next engine can take requests, EngineReady. It
    knows nothing of what the last one was sent; what is sent in between goes nowhere. Totals go on.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = make_client
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=most)
        self._client = make_client()
        self._lost: EngineDied | None = None  # the end of an engine whose successor is to come
        self._past: dict[int, EngineStats] = {}  # by the engine's number, as is the next:
        self._stats: dict[int, EngineStats] = {}

    async def start(self) -> EngineReady:
        """Start the first engine."""
        return await self._client.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine, if there is one."""
        if self._lost is None:
            self._client.send(message)

    async def receive(self) -> FromEngine:
        """The next message; starts the next engine if the last one was lost."""
        if self._lost is not None:
            return await self._succeed(self._lost)
        match await self._client.receive():
            case StepOutputs() as outputs:
                return self._go_on(outputs)
            case EngineDied(reason) as died if self._is_followed():
                self._lost = died
                return EngineLost(reason)
            case message:
                return message

    def seen_at(self) -> float:
        """When the engine last showed life; now, while the next one is on its way."""
        return time.monotonic() if self._lost is not None else self._client.seen_at()

    async def close(self) -> None:
        """End the engine that there is."""
        await self._client.close()

    async def _succeed(self, died: EngineDied) -> EngineReady | EngineDied:
        await self._client.close()
        self._client = self._make_client()
        try:
            ready = await self._client.start()
        except (ConfigError, EngineDead) as error:
            logger.error("the engine could not be started again: %s", error)
            return EngineDied(
                f"{died.reason} It could not be started again; the server's log says why."
            )
        self._lost, self._past = None, dict(self._stats)
        return ready

    def _go_on(self, outputs: StepOutputs) -> StepOutputs:
        stats = outputs.stats
        if (past := self._past.get(stats.engine)) is not None:  # nearly never
            stats = stats.after(past)
            outputs = replace(outputs, stats=stats)
        self._stats[stats.engine] = stats
        return outputs

    def _is_followed(self) -> bool:
        """Whether this death is forgiven; it counts from now on."""
        now, most = self._clock(), self._deaths.maxlen
        if not most or (len(self._deaths) == most and now - self._deaths[0] < WINDOW_S):
            return False
        self._deaths.append(now)
        return True
