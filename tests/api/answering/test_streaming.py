"""Server-sent events over a real connection: their shape, and what happens when a side is gone."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from serve.api.answering.streaming import KEEP_ALIVE, EventStream
from serve.messages import AbortRequests
from tests.api.conftest import ANSWER, MODEL, Server, running_server
from tests.api.scripted import Script
from tests.api.sse import events

HI: list[Any] = [{"role": "user", "content": "Hello"}]
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 100}),
]
both_endpoints = pytest.mark.parametrize(("path", "body"), ENDPOINTS)


def stream(http: httpx.Client, path: str, body: dict[str, Any], **fields: Any) -> list[Any]:
    return events(http.post(path, json={**body, "stream": True, **fields}))


def delta_text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll: what is waited for is another thread's doing."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


@both_endpoints
def test_str_07_usage_is_one_more_chunk_before_the_end(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    whole = http.post(path, json=body).json()

    *chunks, usage, done = stream(http, path, body, stream_options={"include_usage": True})

    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@both_endpoints
@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": False}}])
def test_str_08_without_being_asked_for_no_chunk_lacks_choices(
    http: httpx.Client, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    *chunks, done = stream(http, path, body, **fields)

    assert done == "[DONE]"
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


@both_endpoints
@pytest.mark.parametrize("n", [1, 2])
def test_usg_41_usage_can_ride_on_every_chunk(
    http: httpx.Client, path: str, body: dict[str, Any], n: int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    *chunks, usage, _ = stream(http, path, body, stream_options=options, n=n)

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == usage["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        usage["usage"]["prompt_tokens"]
    }


@both_endpoints
@pytest.mark.parametrize("n", [1, 3])
def test_str_09_every_chunk_has_a_finish_reason_and_one_per_choice_is_set(
    http: httpx.Client, path: str, body: dict[str, Any], n: int
) -> None:
    chunks = stream(http, path, body, n=n)[:-1]

    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(map(delta_text, mine)) == ANSWER
        if "chat" in path:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert mine[-1]["delta"] == {}


def test_an_answer_without_text_still_begins_with_its_role(
    http: httpx.Client, server: Server
) -> None:
    server.script = ""

    first, last, done = stream(http, *ENDPOINTS[0])

    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


@both_endpoints
def test_str_10_a_failure_in_mid_stream_is_one_error_event(
    http: httpx.Client, server: Server, path: str, body: dict[str, Any]
) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=5)

    *chunks, error = stream(http, path, body)

    assert "".join(delta_text(c["choices"][0]) for c in chunks).startswith(" Hello world")
    assert error == {
        "error": {
            "message": "the step blew up",
            "type": "server_error",
            "param": None,
            "code": "step_failed",
        }
    }
    server.script = ANSWER
    assert stream(http, path, body)[-1] == "[DONE]"


def test_str_10_openais_client_raises_on_the_error_event(
    client: openai.OpenAI, server: Server
) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=5)

    with pytest.raises(openai.APIError, match="the step blew up"):
        list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_one_failed_choice_ends_the_others_too(http: httpx.Client, server: Server) -> None:
    scripts = [Script(server.ids(ANSWER), fail_after=2), Script([1], hold_after=1)]
    server.script = lambda request: scripts.pop(0)

    error = stream(http, *ENDPOINTS[1], n=2)[-1]

    assert error["error"]["code"] == "step_failed"
    wait_until(lambda: not server.client.running)


@both_endpoints
@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"n": 0}, 400),
        ({"temperature": -1}, 400),
        ({"top_p": 2}, 400),
        ({"max_tokens": 100_000}, 400),
        ({"model": "nope"}, 404),
    ],
)
def test_str_11_what_is_refused_is_refused_before_the_stream(
    http: httpx.Client, path: str, body: dict[str, Any], fields: dict[str, Any], status: int
) -> None:
    response = http.post(path, json={**body, "stream": True, **fields})

    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def open_request(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave its connection open."""
    payload = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


@both_endpoints
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_str_12_a_client_that_hangs_up_frees_its_requests(
    server: Server, path: str, body: dict[str, Any], streams: bool, n: int
) -> None:
    server.script = Script(server.ids(ANSWER), hold_after=4)
    aborts, finished = server.client.num_aborts, aborted_total(server)

    with closing(open_request(server, path, {**body, "stream": streams, "n": n})) as connection:
        wait_until(lambda: len(server.client.running) == n)
        if streams:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")

    wait_until(lambda: not server.client.running)
    assert server.client.num_aborts == aborts + n
    wait_until(lambda: aborted_total(server) == finished + n)
    wait_until(lambda: b'num_requests_running{engine="0",model_name="tiny"} 0.0' in shown(server))
    wait_until(lambda: b'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0' in shown(server))
    wait_until(lambda: server_load(server) == 0)


def shown(server: Server) -> bytes:
    return bytes(server.on_loop(server.metrics.render))


def server_load(server: Server) -> int:
    with server.http() as http:
        return int(http.get("/load").json()["server_load"])


def aborted_total(server: Server) -> float:
    (line,) = [line for line in shown(server).splitlines() if b'finished_reason="abort"' in line]
    return float(line.split()[-1])


@both_endpoints
def test_str_12_a_request_that_ends_by_itself_is_not_aborted(
    http: httpx.Client, server: Server, path: str, body: dict[str, Any]
) -> None:
    aborts = server.client.num_aborts

    stream(http, path, body)
    http.post(path, json=body)

    assert server.client.num_aborts == aborts


def test_sch_24_an_id_can_be_used_again_while_its_abort_is_on_its_way(
    http: httpx.Client, server: Server
) -> None:
    for _ in range(20):
        server.script = Script(server.ids(ANSWER), hold_after=2)
        with http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "Hello", "stream": True, "request_id": "again"},
        ) as response:
            next(response.iter_raw())
        server.script = ANSWER
        chunks = stream(http, *ENDPOINTS[1], request_id="again")
        assert "".join(delta_text(c["choices"][0]) for c in chunks[:-1]) == ANSWER


@both_endpoints
def test_str_16_line_separators_in_the_text_are_escaped(
    http: httpx.Client, server: Server, path: str, body: dict[str, Any]
) -> None:
    text = 'a\u2028b\u2029c\x85d\re\nf\x0bg\x0ch\x00i"\\j\x1c\x1d\x1e👋'
    server.script = text

    response = http.post(path, json={**body, "stream": True})

    assert response.content.isascii()
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(delta_text(c["choices"][0]) for c in chunks) == text


def test_str_16_openais_client_reads_them(client: openai.OpenAI, server: Server) -> None:
    server.script = text = "a\u2028b\u2029c\x85d\r\n\n e"

    chunks = client.chat.completions.create(model=MODEL, messages=HI, stream=True)

    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


@both_endpoints
def test_stream_interval_sends_fewer_and_larger_chunks(
    http: httpx.Client, server: Server, path: str, body: dict[str, Any]
) -> None:
    server.script = text = " one two three four" * 5

    chunks = stream(http, path, body, stream_interval=8, return_token_ids=True)[:-1]

    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(map(delta_text, choices)) == text
    sizes = [len(ids) for choice in choices if (ids := choice.get("token_ids"))]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) == {8}
    assert sum(sizes) == 21


@both_endpoints
def test_a_dead_engine_ends_streams_with_an_error(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    with running_server() as mortal, mortal.http() as http:
        mortal.script = Script(mortal.ids(ANSWER), hold_after=3)
        with http.stream("POST", path, json={**body, "stream": True}) as response:
            chunks = response.iter_text()
            next(chunks)
            mortal.on_loop(lambda: mortal.client.die("it was killed"))
            rest = "".join(chunks)
        refused = http.post(path, json=body)
        health = http.get("/health")

    assert '"code": "engine_dead"' in rest
    assert not rest.rstrip().endswith("[DONE]")
    assert refused.status_code == health.status_code == 503
    assert "it was killed" in refused.json()["error"]["message"]


class FakeOutputs:
    """Counts its closings."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def aclose(self) -> None:
        self.num_closed += 1


async def never() -> Any:
    await asyncio.Event().wait()


async def test_str_17_a_client_that_does_not_read_is_dropped_after_a_while() -> None:
    outputs = FakeOutputs()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"data: x\n\n"

    async def send(message: Any) -> None:
        if message.get("body"):
            await never()  # the socket's buffers are full

    response = EventStream(endless(), outputs, keep_alive_s=0.01, stall_limit_s=0.03)  # type: ignore

    async with asyncio.timeout(20):
        await response({"type": "http"}, never, send)

    assert outputs.num_closed == 1


def test_str_17_clients_that_do_not_read_hold_up_nobody(http: httpx.Client, server: Server) -> None:
    long = " one two three four" * 100
    server.script = long
    received = server.client.received
    before = len(received)
    stalled = [
        open_request(server, path, {**body, "stream": True, "max_tokens": 400, "n": 4})
        for path, body in ENDPOINTS * 5
    ]
    wait_until(lambda: len(received) - before == 4 * len(stalled))
    wait_until(lambda: not server.client.running)  # the engine never waits for a socket

    server.script = ANSWER
    assert stream(http, *ENDPOINTS[0])[-1] == "[DONE]"
    for connection in stalled:
        with closing(connection):
            connection.settimeout(20)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += connection.recv(1 << 20)
            assert answer.count(b'"finish_reason":"length"') == 4
            assert b"[DONE]" in answer


async def test_comments_keep_a_silent_stream_alive() -> None:
    sent: list[bytes] = []
    enough = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        await enough.wait()
        yield b"data: x\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent.count(KEEP_ALIVE) == 2:
            enough.set()

    async with asyncio.timeout(20):
        await EventStream(silent(), FakeOutputs(), keep_alive_s=0.01)(  # type: ignore
            {"type": "http"}, never, send
        )

    assert sent[0] == b""  # the status line
    assert sent[1:3] == [KEEP_ALIVE] * 2
    assert sent[-2:] == [b"data: x\n\n", b""]


async def test_an_unforeseen_error_ends_the_stream_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[bytes] = []

    async def broken() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"
        raise ZeroDivisionError("a secret")

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    outputs = FakeOutputs()
    await EventStream(broken(), outputs)({"type": "http"}, never, send)  # type: ignore

    assert b"internal_error" in sent[-2]
    assert b"secret" not in sent[-2]
    assert "a secret" in caplog.text
    assert outputs.num_closed == 1


def test_aborts_name_only_the_request_that_was_left(http: httpx.Client, server: Server) -> None:
    server.script = Script(server.ids(ANSWER), hold_after=1)
    with closing(open_request(server, *ENDPOINTS[1])):
        wait_until(lambda: len(server.client.running) == 1)
        (left,) = server.client.running
        with closing(open_request(server, *ENDPOINTS[1])):
            wait_until(lambda: len(server.client.running) == 2)
        wait_until(lambda: list(server.client.running) == [left])
    wait_until(lambda: not server.client.running)
    last = [m for m in server.client.received if isinstance(m, AbortRequests)][-1]
    assert last.request_ids == [left]
