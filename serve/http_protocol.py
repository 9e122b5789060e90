"""HTTP on one connection: uvicorn's protocol, with limits on what a client makes us keep or await.

uvicorn collects heads and trailers without end, waits for ever for the rest of a request, and
keeps reading a body that was answered before its end. Here each of these has a limit, refusals
have the API's form, and a client that is still sending gets to read why.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LINGER_S = 5.0
"""How long a client that is refused while it sends may go on, unread, before it is cut off."""
MAX_PIPELINED = 32
"""Requests that may wait on a connection for the answer to an earlier one."""
CHUNK_FRAMING_BYTES = 16
"""What announcing a chunk may take; more is an extension, and counts as part of the head."""
FIELD_FRAMING_BYTES = 4  # colon, space and line end
_NO_UPGRADE = frozenset({b"upgrade", b"http2-settings"})


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may ask of us before its request is there."""

    max_head_bytes: int = 64 * 2**10  # address, headers, chunk extensions and trailers
    receive_timeout_s: float = 30.0  # from a request's first byte to its last
    max_connections: int = 16384  # of all clients


@dataclass(frozen=True, slots=True)
class _Transport:
    """The part of a transport that uvicorn's protocol uses, with our way of hanging up."""

    write: Callable[[bytes], None]
    close: Callable[[], None]
    is_closing: Callable[[], bool]


class HttpProtocol(HttpToolsProtocol):
    """One connection, from its first byte to the last answer.

    An answer that begins before its request has come whole is the connection's last: nothing of
    the rest is parsed or kept.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *arguments: Any,
        limits: HttpLimits = HttpLimits(),
        **settings: Any,
    ) -> None:
        super().__init__(config, *arguments, **settings)
        self._limits = limits
        self._raw: asyncio.Transport
        self._is_receiving = False  # a request that has begun and is not complete
        self._in_head = False
        self._num_field_bytes = 0  # of its address, headers and trailers, as they were parsed
        self._num_extra_bytes = 0  # that came for it and were no body, parsed or not
        self._num_body_bytes = 0
        self._num_requests = 0
        self._may_stay_open = False  # after this request, if it comes whole before its answer
        self._is_ending = False  # the server stops
        self._has_hung_up = False
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come. One that says nothing is an idle one."""
        super().connection_made(transport)
        self._raw = transport
        own = _Transport(transport.write, self._hang_up, self._is_leaving)
        self.transport = cast("asyncio.Transport", own)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if len(self.connections) > self._limits.max_connections:
            reason = "Too many connections are open. Try again later, or raise --max-connections."
            self._refuse("503 Service Unavailable", "too_many_connections", reason)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        self._has_hung_up = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._has_hung_up:
            return
        self._unset_keepalive_if_required()
        request, num_body_bytes = self._num_requests, self._num_body_bytes
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse_bytes()
            return
        if self._is_receiving and request == self._num_requests:  # else parsed bytes say enough
            self._num_extra_bytes += len(data) - (self._num_body_bytes - num_body_bytes)
            self._num_extra_bytes = max(0, self._num_extra_bytes)
            if self._is_head_too_large():
                self._refuse_bytes()
                return
        if self._is_receiving or not self._owes_answer():
            self._start_timer()
        else:
            self._stop_timer()

    def shutdown(self) -> None:
        """The server stops: what is not there yet is not waited for."""
        self._is_ending = True
        if self._has_hung_up:
            self._raw.abort()
        elif self._is_receiving and not self._owes_answer():
            self._raw.close()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Cut the connection, whatever is under way."""
        self._raw.abort()

    # ------------------------------------------------------------------ the parser's events

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_receiving = self._in_head = True
        self._num_field_bytes = self._num_extra_bytes = 0
        self._num_requests += 1
        self._stop_timer()  # it has its own time

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._count_fields(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody reads: it may not pass for a header."""
        self._count_fields(len(name) + len(value) + FIELD_FRAMING_BYTES)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete. The answer may begin now, and will be the last if it does."""
        if self.parser.should_upgrade():
            return  # see `_parse`
        self._in_head = False
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many requests at once")
        self._may_stay_open, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_chunk_header(self) -> None:
        """A chunk of a body was announced."""
        self._num_extra_bytes -= CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there."""
        if self.parser.should_upgrade():
            return
        self._is_receiving = False
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_stay_open and not self._is_ending

    # ------------------------------------------------------------------ inside

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Offers to speak another protocol are declined, as every server may:
        the parser, which would leave the request's body unread, is given it without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("there is no way on from here") from offer
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() not in _NO_UPGRADE)
            if name not in _NO_UPGRADE:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _count_fields(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._is_head_too_large():
            raise ValueError("the head is too large")  # which the parser passes on as its own

    def _is_head_too_large(self) -> bool:
        largest = max(self._num_field_bytes, self._num_extra_bytes)
        return largest > self._limits.max_head_bytes

    def _owes_answer(self) -> bool:
        """Whether an answer is due or has begun, besides that to the request being received."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        if self._is_receiving and not self._in_head:
            return bool(self.pipeline) or self.cycle.response_started
        return True

    def _refuse_bytes(self) -> None:
        if self._is_head_too_large():
            reason = (
                f"Address, headers and trailers exceed {self._limits.max_head_bytes} bytes. "
                "Send less, or raise --max-header-bytes."
            )
            self._refuse("431 Request Header Fields Too Large", "headers_too_large", reason)
        else:
            self._refuse("400 Bad Request", "bad_request", "Invalid HTTP request received.")

    def _refuse(self, status: str, code: str, reason: str) -> None:
        """Say why, unless that would run into another answer, and hang up."""
        if self._owes_answer():
            self._raw.close()
            return
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": code}
        if status[0] == "5":
            error["type"] = "server_error"
        body = json.dumps({"error": error})
        self._raw.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode("ascii")
        )
        if self._is_receiving and not self._in_head:  # the application waits for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_receiving = True  # whatever it was, there may be more of it
        self._hang_up()

    def _is_leaving(self) -> bool:
        return self._has_hung_up or self._raw.is_closing()

    def _hang_up(self) -> None:
        """Close. To close on a client that still sends would destroy what it has not read yet, so
        its bytes are dropped for a while first."""
        if self._is_leaving():
            return
        self._has_hung_up = True
        self._stop_timer()
        if self._is_receiving and not self._is_ending and self._raw.can_write_eof():
            self.flow.resume_reading()
            self._raw.write_eof()
            self._timer = self.loop.call_later(LINGER_S, self._raw.abort)
        else:
            self._raw.close()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.receive_timeout_s, self._time_is_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.flow.read_paused or self._owes_answer():  # it is the client that waits for us
            self._start_timer()
            return
        self._refuse(
            "408 Request Timeout",
            "request_timeout",
            f"The request did not arrive within {self._limits.receive_timeout_s:g} s. Send it "
            "faster, or raise --timeout-receive.",
        )
