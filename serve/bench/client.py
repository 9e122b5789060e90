"""One HTTP request and the bytes of its answer, each piece with the time it came.

The client shares its cores with the server it measures, so it does as little as possible while
tokens come: llhttp (httptools) takes the chunked encoding apart, and JSON is read only when an
answer is complete. CPU time an event, 8 streams of 2,000 events, on uvloop and busy cores: 26 µs,
where aiohttp takes 93 and httpx 167.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address."""

    host: str
    port: int
    tls: bool
    path: str  # before /v1, without a slash at its end
    api_key: str | None = None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> Target:
        """Raises ConfigError for anything but an http(s) URL."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {base_url}: give a URL such as http://127.0.0.1:8000.")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path, api_key)


@dataclass(slots=True)
class RawAnswer:
    """An answer as it came. `pieces` are decoded from the chunked encoding, in order."""

    status: int = 0
    content_type: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # time.perf_counter(), bytes

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)


def encode_request(
    target: Target, path: str, body: Mapping[str, Any] | None = None, method: str = "POST"
) -> bytes:
    """The bytes to send; made before a run, so that sending costs nothing but the sending."""
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    lines = [
        f"{method} {target.path}{path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Connection: close",
        f"Content-Length: {len(content)}",
    ]
    if body is not None:
        lines.append("Content-Type: application/json")
    if target.api_key is not None:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


async def exchange(target: Target, request: bytes) -> RawAnswer:
    """Send a request on a connection of its own and read the answer to its end.

    Raises OSError when there is no connection or it breaks off.
    """
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.tls else None
    transport, connection = await loop.create_connection(
        lambda: _Connection(request, loop.create_future()), target.host, target.port, ssl=context
    )
    try:
        return await connection.answered
    finally:
        transport.close()


class _Connection(asyncio.Protocol):
    """Writes the request once connected, and completes `answered` with the answer."""

    def __init__(self, request: bytes, answered: asyncio.Future[RawAnswer]) -> None:
        self.answered = answered
        self._request = request
        self._answer = RawAnswer()
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP ({error})"))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._answer.status:  # an answer without a length ends like this
            self.on_message_complete()
        self._fail(ConnectionError(f"the connection broke off ({error or 'closed'})"))

    # called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._answer.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._answer.pieces.append((self._now, piece))

    def on_message_complete(self) -> None:
        if not self.answered.done():
            self.answered.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        if not self.answered.done():
            self.answered.set_exception(error)
