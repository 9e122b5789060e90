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

from serve.api.errors import ClientGone, error_body, error_response
from serve.api.generation import Outputs
from serve.errors import RequestError, ServeError

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

    The status line waits for the first event, so that what the engine refuses has its own status.
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
        refusal: Callable[[Exception], Response] = error_response,
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
        self._refusal = refusal
        self._begun = False  # whether the status line is out
        self._keep_alive_s = keep_alive_s
        self._stall_limit_s = stall_limit_s
        self._keeping_alive: asyncio.Task[None] | None = None  # a comment being written
        self._write_began: float | None = None
        self._num_writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the events end or the reader is gone."""
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks.append(asyncio.create_task(self._answer(scope, receive, send)))
            tasks.append(asyncio.create_task(self._watch(receive, send)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._keeping_alive is not None:
                tasks.append(self._keeping_alive)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._outputs.aclose()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for event in self._events:
                await self._write(send, event)
        except RequestError as error:
            if self._keeping_alive is not None:
                await asyncio.wait({self._keeping_alive})
            if not self._begun:
                self._begun = True
                await self._refusal(error)(scope, receive, send)
                return
            await self._write(send, self._error_event(error))
        except ServeError as error:
            await self._write(send, self._error_event(error))
        except Exception as error:
            logger.exception("a stream failed")
            await self._write(send, self._error_event(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, event: bytes) -> None:
        if self._keeping_alive is not None:
            await asyncio.wait({self._keeping_alive})
        self._write_began = time.monotonic()
        await self._begin(send)
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._write_began = None
        self._num_writes += 1

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client is gone or has stopped reading."""
        gone = asyncio.create_task(until_gone(receive))
        try:
            while not gone.done():
                writes_before = self._num_writes
                await asyncio.wait({gone}, timeout=self._keep_alive_s)
                if self._write_began is None:
                    if writes_before == self._num_writes and not gone.done():
                        self._keep_alive(send)
                elif time.monotonic() - self._write_began > self._stall_limit_s:
                    logger.info("a client stopped reading its stream; it is dropped")
                    return
        finally:
            gone.cancel()

    def _keep_alive(self, send: Send) -> None:
        """Write a comment; `_write` waits for it, so that two writes never overlap."""

        async def write() -> None:
            self._write_began = time.monotonic()
            await self._begin(send)
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._write_began = None
            self._keeping_alive = None

        self._keeping_alive = asyncio.create_task(write())


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
