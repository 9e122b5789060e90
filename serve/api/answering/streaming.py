"""Server-sent events: an answer written event by event, for as long as its reader reads."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.api.answering.generation import Outputs
from serve.api.errors import ClientGone, error_body, error_response
from serve.api.middleware import DIRECT_SEND
from serve.errors import ServeError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_INTERVAL_S = 15.0
STALL_LIMIT_S = 60.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


def error_event(error: Exception) -> bytes:
    """An error after the status line has gone: OpenAI's error body as one more event."""
    return f"data: {error_body(error)}\n\n".encode("ascii")


def named_event(name: str, **fields: Any) -> bytes:
    """An event with a name, which its JSON repeats as `type`."""
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode("ascii")


class EventStream(Response):
    """Sends `events` as they come and then closes `outputs`, whatever happens.

    The status line waits for the first event, so that what goes wrong before it has its own status.
    A later failure ends the stream with an error event. A client that hangs up, or that reads
    nothing for `stall_limit_s`, ends the generation. While nothing is generated, comments keep the
    connection from being taken for dead.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        outputs: Outputs,
        *,
        error_event: Callable[[Exception], bytes] = error_event,
        keep_alive_s: float = KEEP_ALIVE_INTERVAL_S,
        stall_limit_s: float = STALL_LIMIT_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        # X-Accel-Buffering: nginx would otherwise hold events back.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._outputs = outputs
        self._error_event = error_event
        self._keep_alive_s = keep_alive_s
        self._stall_limit_s = stall_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the events end or the reader is gone."""
        writer = EventWriter(send, scope.get(DIRECT_SEND, send), self.raw_headers)
        tasks = [
            asyncio.create_task(self._answer(scope, receive, send, writer)),
            asyncio.create_task(self._watch(receive, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await writer.aclose()
            await self._outputs.aclose()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, writer: EventWriter
    ) -> None:
        try:
            async for event in self._events:
                await writer.write(event)
        except Exception as error:
            if not isinstance(error, ServeError):
                logger.exception("a stream failed")
            if await writer.takes_status():
                await error_response(error)(scope, receive, send)
                return
            await writer.write(self._error_event(error))
        await writer.end()

    async def _watch(self, receive: Receive, writer: EventWriter) -> None:
        """Returns when the client is gone or has stopped reading."""
        gone = asyncio.create_task(until_gone(receive))
        try:
            while not gone.done():
                writes_before = writer.num_writes
                await asyncio.wait({gone}, timeout=self._keep_alive_s)
                if writer.began is None:
                    if writes_before == writer.num_writes and not gone.done():
                        writer.keep_alive()
                elif time.monotonic() - writer.began > self._stall_limit_s:
                    logger.info("a client stopped reading its stream; it is dropped")
                    return
        finally:
            gone.cancel()


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


async def until_gone(receive: Receive) -> None:
    """Returns when the client closes the connection. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled (raising ClientGone here) if the client hangs up."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("The client hung up before its answer was ready.")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
