"""Under `/v1/messages` every error has Anthropic's shape, whoever answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import pytest

from serve.config import ServerConfig
from tests.api.conftest import MODEL, Server, running_server
from tests.api.scripted import Script

BODY = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
KEY = {"x-api-key": "k"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    config = ServerConfig(api_key=("k",), max_request_bytes=1024)
    with running_server(config) as server:
        yield server


@pytest.fixture
def http(guarded: Server) -> Iterator[httpx.Client]:
    guarded.script = " Hello world"
    with guarded.http(headers=KEY) as client:
        yield client


def kind_of(answer: httpx.Response) -> str:
    """The error's type, after everything about its shape."""
    error = answer.json()
    assert set(error) == {"type", "error", "request_id"}
    assert set(error["error"]) == {"type", "message"}
    assert error["type"] == "error"
    assert error["error"]["message"]
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content)
    return str(error["error"]["type"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_every_status_has_its_type(http: httpx.Client, path: str) -> None:
    def posted(**arguments: object) -> tuple[int, str]:
        answer = http.post(path, **arguments)  # type: ignore[arg-type]
        return answer.status_code, kind_of(answer)

    assert posted(json=BODY, headers={"x-api-key": "no"}) == (401, "authentication_error")
    assert posted(json={**BODY, "model": "nope"}) == (404, "not_found_error")
    assert posted(content=b"{") == (400, "invalid_request_error")
    assert posted(json={**BODY, "messages": 5}) == (400, "invalid_request_error")
    assert posted(content=b"x" * 2000) == (413, "request_too_large")
    assert posted(content=b"a=b", headers={"content-type": "text/plain"}) == (
        415,
        "invalid_request_error",
    )
    wrong = http.get(path)
    assert (wrong.status_code, kind_of(wrong)) == (405, "invalid_request_error")
    assert wrong.headers["allow"] == "POST"
    unknown = http.post(f"{path}/batches", json=BODY)
    assert (unknown.status_code, kind_of(unknown)) == (404, "not_found_error")


@pytest.mark.parametrize("stream", [False, True])
def test_so_have_those_of_the_engine(guarded: Server, http: httpx.Client, stream: bool) -> None:
    for script, status, kind in (
        (Script([], refuse_for_s=3.0), 429, "rate_limit_error"),
        (Script([], refuse_for_s=3.0, expires=True), 503, "overloaded_error"),
        (Script([], expires=True), 504, "timeout_error"),
        (Script([], fail_after=0), 500, "api_error"),
    ):
        guarded.script = script
        answer = http.post("/v1/messages", json={**BODY, "stream": stream})
        assert (answer.status_code, kind_of(answer)) == (status, kind)
        assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_an_unforeseen_failure_tells_nothing_of_the_inside(
    guarded: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("serve.api.anthropic.messages.chat_request", broken)
    answer = http.post("/v1/messages", json=BODY)
    assert (answer.status_code, kind_of(answer)) == (500, "api_error")
    assert "inside" not in answer.text


def test_in_mid_stream_the_event_has_the_same_shape(guarded: Server, http: httpx.Client) -> None:
    guarded.script = Script(guarded.ids(" Hello world one two"), fail_after=2)
    answer = http.post(
        "/v1/messages", json={**BODY, "stream": True}, headers={"x-request-id": "mine"}
    )
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (answer.status_code, name) == (200, "event: error")
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == answer.headers["request-id"] == "mine"


def test_anthropics_client_reads_the_id_and_the_rest_of_the_server_keeps_openais_shape(
    guarded: Server, http: httpx.Client
) -> None:
    with anthropic.Anthropic(base_url=guarded.url, api_key="no", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**BODY)  # type: ignore[call-overload]
        assert refused.value.request_id == refused.value.response.headers["request-id"]
    with anthropic.Anthropic(base_url=guarded.url, api_key="k", max_retries=0) as client:
        message = client.messages.create(**BODY)  # type: ignore[call-overload]
        assert message._request_id
    assert http.post("/v1/chat/completions", json={}).json()["error"]["code"]
    assert http.post("/v1/messagesx", json={}).json()["error"]["code"] == "unknown_url"


def test_a_dead_engine_is_an_overload() -> None:
    with running_server() as server, server.http() as http:
        server.on_loop(lambda: server.client.die("gone"))
        while (answer := http.post("/v1/messages", json=BODY)).status_code == 200:
            pass
        assert (answer.status_code, kind_of(answer)) == (503, "overloaded_error")
