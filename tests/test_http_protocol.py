"""What a connection may ask of us, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from serve.http_protocol import MAX_PIPELINED, HttpLimits, HttpProtocol

LIMIT = 4096
STRICT = HttpLimits(max_head_bytes=LIMIT)
SLOW_S = 0.4


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and says how long it was; /early answers without reading, /slow takes its
    time, /headers says which headers there were."""
    if scope["path"] == "/slow":
        await asyncio.sleep(SLOW_S)
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = str(size).encode()
    if scope["path"] == "/headers":
        body = b",".join(name for name, _ in scope["headers"])
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connection(
    limits: HttpLimits = STRICT,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection to a server with the protocol."""
    async with running(limits) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def running(limits: HttpLimits) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """A server with the protocol, and its port."""
    config = uvicorn.Config(
        app,
        http=partial(HttpProtocol, limits=limits),
        lifespan="off",
        port=0,
        log_config=None,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, port
    finally:
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


# ------------------------------------------------------------------ bytes without end


def chunked(path: bytes, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n%s" % (path, body)


async def flooded(first: bytes, more: bytes) -> tuple[bytes, int]:
    """What the server says to `first` and then `more` over and over, and how many of its bytes it
    took until it hung up."""
    async with connection() as (reader, writer):
        writer.write(first)
        said, sent = asyncio.create_task(reader.read()), 0
        with suppress(ConnectionError):
            while not said.done() and sent < 50_000_000:
                writer.write(more)
                await writer.drain()
                sent += len(more)
                await asyncio.sleep(0)
        return await said, sent


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\n", b"a1:\r\n" * 100),
        (b"GET /", b"a" * 1000),
        (chunked(b"/", b"1\r\na\r\n0\r\n"), b"a1:\r\n" * 100),
        (chunked(b"/", b"1\r\na\r\n0\r\na1: "), b"a" * 1000),
        (chunked(b"/", b"1;x="), b"a" * 1000),
        (chunked(b"/", b""), b"1;" + b"x" * 1000 + b"\r\na\r\n"),
        (chunked(b"/", b""), b"0" * 1000),
    ],
    ids=[
        "a header",
        "headers",
        "an address",
        "trailers",
        "a trailer",
        "an extension",
        "extensions",
        "a size",
    ],
)
async def test_sec_41_a_head_without_end_is_cut_off_and_what_frames_a_body_is_part_of_it(
    first: bytes, more: bytes
) -> None:
    said, sent = await flooded(first, more)
    assert said.startswith(b"HTTP/1.1 431 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert sent < 10_000_000  # what the sockets' buffers held when it was refused


@pytest.mark.parametrize("more", [b"a1:\r\n" * 100, b"5\r\nabcde\r\n" * 100])
async def test_sec_41_an_answer_before_the_end_of_the_body_is_the_last(more: bytes) -> None:
    said, _ = await flooded(
        chunked(b"/early", b"1\r\na\r\n0\r\n"[: 6 if b"5" in more else None]), more
    )
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.count(b"HTTP/1.1") == 1
    assert b"connection: close" in said


async def test_sec_41_a_client_that_is_refused_while_it_sends_reads_why() -> None:
    async with connection() as (reader, writer):
        writer.write(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        for _ in range(80):  # an ordinary client sends all of it, and then looks for an answer
            writer.write(b"a" * 100_000)
            await writer.drain()
        assert await read_answer(reader) == (200, b"0")
        assert await reader.read() == b""


async def test_sec_41_trailers_are_no_headers_and_small_chunks_no_large_head() -> None:
    async with connection() as (reader, writer):
        body = b"1;x=y\r\na\r\n" * 3000 + b"0\r\nauthorization: x\r\n\r\n"
        for byte in range(0, len(body), 5000):
            writer.write(chunked(b"/headers", b"") * (byte == 0) + body[byte : byte + 5000])
            await writer.drain()
            await asyncio.sleep(0.01)
        assert await read_answer(reader) == (200, b"host,transfer-encoding")
        writer.write(chunked(b"/", body))
        assert await read_answer(reader) == (200, b"3000")


@pytest.mark.parametrize("offer", [b"websocket", b"h2c"])
async def test_sec_51_another_protocol_is_declined_without_a_word(
    offer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\nhttp2-settings: A\r\n" % offer
    async with connection() as (reader, writer):
        whole = request(headers=upgrade, body=b"abc")
        for pieces in ([whole + whole], [whole[:-3], b"abc", whole]):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            assert await read_answer(reader) == (200, b"3")
            assert await read_answer(reader) == (200, b"3")
        writer.write(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_answer(reader))[0] == 400
    assert not caplog.records


async def test_sec_41_requests_that_do_not_wait_for_answers_are_not_collected() -> None:
    async with connection() as (reader, writer):
        writer.write(request() * (MAX_PIPELINED // 2))
        for _ in range(MAX_PIPELINED // 2):
            assert await read_answer(reader) == (200, b"0")
        writer.write(request(path=b"/slow") + request() * 2 * MAX_PIPELINED)
        assert await reader.read() == b""


async def test_nothing_is_said_in_the_middle_of_an_answer() -> None:
    async with connection() as (reader, writer):
        writer.write(request(path=b"/slow") + b"hello\r\n\r\n")
        assert await reader.read() == b""


async def test_more_connections_than_the_limit_are_turned_away() -> None:
    async with running(HttpLimits(max_connections=1)) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        assert await read_answer(reader) == (200, b"0")
        other_reader, other = await asyncio.open_connection("127.0.0.1", port)
        other.write(request())
        status, body = await read_answer(other_reader)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        other.close()
        writer.write(request())
        assert await read_answer(reader) == (200, b"0")
        writer.close()


# ------------------------------------------------------------------ bytes that never come

HASTY = HttpLimits(receive_timeout_s=SLOW_S / 2)


@pytest.mark.parametrize(
    "half",
    [
        b"POST / HT",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\na",
        chunked(b"/", b"3\r\nabc\r\n"),
        b"\r\n",
    ],
    ids=["head", "body", "chunks", "nothing"],
)
async def test_ops_41_a_request_that_never_arrives_whole_is_a_408_and_the_end(half: bytes) -> None:
    async with connection(HASTY) as (reader, writer):
        writer.write(request())
        assert await read_answer(reader) == (200, b"0")
        writer.write(half)
        status, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert await reader.read() == b""


async def test_ops_41_drops_of_a_request_do_not_keep_it_open() -> None:
    async with connection(HASTY) as (reader, writer):
        said = asyncio.create_task(reader.read())
        with suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000:
                if said.done():
                    break
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(HASTY.receive_timeout_s / 10)
        assert (await said).startswith(b"HTTP/1.1 408 ")


async def test_ops_41_answering_has_no_limit() -> None:
    async with connection(HASTY) as (reader, writer):
        for pieces in ([request(path=b"/slow")], [request(path=b"/slow"), request()[:9]]):
            for piece in pieces:
                writer.write(piece)
            assert await read_answer(reader) == (200, b"0")
        writer.write(request()[9:])
        assert await read_answer(reader) == (200, b"0")


@pytest.mark.parametrize("half", [b"", b"POST / HT", request(body=b"abc")[:-1]])
async def test_ops_42_what_is_not_there_yet_is_not_waited_for_at_the_end(
    half: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(HttpLimits()) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        assert await read_answer(reader) == (200, b"0")
        writer.write(half)
        await asyncio.sleep(0.05)
        await asyncio.wait_for(server.shutdown(), 5)
        assert await reader.read() == b""
        writer.close()
    assert not [record for record in caplog.records if record.levelname != "INFO"]
