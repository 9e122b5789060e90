"""The bytes of one event stream: its head, its events, and comments while there are none."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Send

KEEP_ALIVE = b": keep-alive\n\n"


class EventWriter:
    """Writes one stream's head and body; two writes never overlap.

    `began` is when the write that goes on began; `num_writes` counts those that are done.
    """

    def __init__(self, send: Send, send_body: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.began: float | None = None
        self.num_writes = 0
        self._send = send
        self._send_body = send_body
        self._headers = headers
        self._has_begun = False  # the status line is out
        self._comment: asyncio.Task[None] | None = None  # being written

    async def write(self, event: bytes) -> None:
        """The next event, after the status line if it is the first."""
        if self._comment is not None:
            await asyncio.wait({self._comment})
        self.began = time.monotonic()
        if not self._has_begun:
            await self._begin()
        await self._send_body({"type": "http.response.body", "body": event, "more_body": True})
        self.began = None
        self.num_writes += 1

    async def takes_status(self) -> bool:
        """Whether the status line can still be chosen; then this writer writes none."""
        if self._comment is not None:
            await asyncio.wait({self._comment})
        free = not self._has_begun
        self._has_begun = True
        return free

    async def end(self) -> None:
        """Nothing follows."""
        await self._send_body({"type": "http.response.body", "body": b"", "more_body": False})

    def keep_alive(self) -> None:
        """Write a comment; `write` waits for it."""

        async def comment() -> None:
            self.began = time.monotonic()
            if not self._has_begun:
                await self._begin()
            await self._send_body(
                {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
            )
            self.began = None
            self._comment = None

        self._comment = asyncio.create_task(comment())

    async def aclose(self) -> None:
        """Give up a comment that is being written."""
        if self._comment is not None:
            self._comment.cancel()
            await asyncio.gather(self._comment, return_exceptions=True)

    async def _begin(self) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
