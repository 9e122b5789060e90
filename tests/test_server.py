"""The HTTP protocol's limits, on a real socket."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from serve.server import HttpProtocol, spare_the_collector

LIMIT = 4096


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and says how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection to a server with the protocol."""
    config = uvicorn.Config(
        answer_ok,
        http=HttpProtocol,
        h11_max_incomplete_event_size=LIMIT,
        lifespan="off",
        port=0,
        log_config=None,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await server.shutdown()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    length = next(
        int(line.split(b":")[1])
        for line in head.splitlines()
        if line.lower().startswith(b"content-length")
    )
    return status, await reader.readexactly(length)


def request(headers: bytes = b"", body: bytes = b"", path: bytes = b"/") -> bytes:
    return (
        b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n"
        b"content-length: " + str(len(body)).encode() + b"\r\n" + headers + b"\r\n" + body
    )


@pytest.mark.parametrize(
    "large",
    [
        request(headers=b"x: " + b"a" * LIMIT + b"\r\n"),
        request(headers=b"".join(b"x%d: a\r\n" % i for i in range(1000))),
        request(path=b"/" + b"a" * LIMIT),
    ],
)
async def test_a_large_head_is_a_431_and_the_end(large: bytes) -> None:
    async with connection() as (reader, writer):
        writer.write(large)
        status, body = await read_answer(reader)

        assert status == 431
        assert json.loads(body)["error"]["code"] == "headers_too_large"
        assert await reader.read() == b""


async def test_a_head_without_end_is_cut_off() -> None:
    async with connection() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: ")

        # The server hangs up while we still write: that resets the connection, answer or not.
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"a" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        (end,) = await asyncio.gather(reader.read(), return_exceptions=True)

        assert isinstance(end, ConnectionError) or b" 431 " in end


async def test_large_bodies_and_many_requests_are_no_large_head() -> None:
    async with connection() as (reader, writer):
        for size in (0, 100_000, 3, 50_000):
            for chunk in (
                request(headers=b"x: " + b"a" * 1000 + b"\r\n"),
                request(body=b"b" * size),
            ):
                writer.write(chunk)
            assert await read_answer(reader) == (200, b"0")
            assert await read_answer(reader) == (200, str(size).encode())


async def test_what_is_no_http_is_a_400_in_the_apis_form() -> None:
    async with connection() as (reader, writer):
        writer.write(b"hello\r\n\r\n")
        status, body = await read_answer(reader)

        assert status == 400
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_what_comes_after_the_start_is_still_collected() -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    try:
        spare_the_collector()
        assert gc.get_freeze_count() > 0
        knot = weakref.ref(Knot())
        gc.collect()
        assert knot() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
