"""How the front and the engine core exchange messages."""

from __future__ import annotations

from typing import Protocol

from serve.messages import EngineReady, FromEngine, ToEngine


class EngineClient(Protocol):
    """One engine, seen from the front's event loop."""

    async def start(self) -> EngineReady:
        """Start the engine and wait until it can take requests.

        Raises ConfigError for a start-up mistake, EngineDead when it died.
        """

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""

    async def receive(self) -> FromEngine:
        """The next message. After the engine's death: EngineDied, at once and every time."""

    def seen_at(self) -> float:
        """When the engine last showed that it lives, if only by a word (`time.monotonic`)."""

    async def close(self) -> None:
        """Stop the engine if it still runs, and release everything. No process outlives this."""
