"""Rendering requests without running them, and aborting those that run."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

from serve.messages import AbortRequests, AddRequest
from tests.api.conftest import Server
from tests.api.scripted import Script

HI: list[Any] = [{"role": "user", "content": "Hello"}]


def sent(server: Server) -> list[AddRequest]:
    return [m for m in server.client.received if isinstance(m, AddRequest)]


def test_a_rendered_chat_is_what_the_engine_would_get(http: httpx.Client, server: Server) -> None:
    body = {"messages": HI, "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "request_id": "r1"}
    before = len(sent(server))

    rendered = http.post("/v1/chat/completions/render", json=body).json()

    assert len(sent(server)) == before
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    request = sent(server)[-1]
    assert rendered["token_ids"] == request.prompt_token_ids
    assert rendered["request_id"] == "chatcmpl-r1"
    assert rendered["sampling_params"]["max_tokens"] == request.sampling.max_tokens == 3
    assert rendered["sampling_params"]["stop_token_ids"] == list(request.sampling.stop_token_ids)
    assert "prompt_text" not in rendered


def test_rendered_completions_are_a_list_with_one_per_prompt(
    http: httpx.Client, server: Server
) -> None:
    body = {"prompt": ["Hello", " world one"], "n": 2, "return_prompt_text": True}

    rendered = http.post("/v1/completions/render", json=body).json()

    assert [r["token_ids"] for r in rendered] == [server.ids("Hello"), server.ids(" world one")]
    assert [r["prompt_text"] for r in rendered] == ["Hello", " world one"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions/render", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions/render", {"messages": HI, "model": "no"}, 404, "model"),
        ("/v1/completions/render", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions/render", {"prompt": [1] * 600}, 400, "prompt"),
        ("/abort_requests", {}, 400, "request_ids"),
        ("/abort_requests", {"request_ids": [5]}, 400, "request_ids.0"),
    ],
)
def test_what_could_not_run_cannot_be_rendered(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = http.post(path, json=body)

    assert response.status_code == status
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("aborted_id", ["chatcmpl-mine", "mine"])
def test_an_open_request_can_be_aborted_by_its_id(
    http: httpx.Client, server: Server, n: int, aborted_id: str
) -> None:
    server.script = Script(server.ids(" one two"), hold_after=2)
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.http() as other:
            body = {"messages": HI, "request_id": "mine", "n": n}
            answers.append(other.post("/v1/chat/completions", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    while server.on_loop(lambda: len(server.client.running)) < n:
        time.sleep(0.01)
    others = http.post("/abort_requests", json={"request_ids": ["other", "min", ""]}).json()
    done = http.post("/abort_requests", json={"request_ids": [aborted_id]}).json()
    thread.join(30)

    assert others == {"num_aborted": 0}
    assert done == {"num_aborted": 1}
    assert answers[0].status_code == 499
    assert answers[0].json()["error"]["code"] == "request_aborted"
    aborts = [m.request_ids for m in server.client.received if isinstance(m, AbortRequests)][-n:]
    assert len({i for ids in aborts for i in ids}) == n


def test_an_aborted_stream_keeps_its_text_and_ends_with_the_error(
    http: httpx.Client, server: Server
) -> None:
    server.script = Script(server.ids(" one two three"), hold_after=2)
    body = {"prompt": "a", "stream": True, "request_id": "mine"}

    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert " one" in next(lines)
        with server.http() as other:
            other.post("/abort_requests", json={"request_ids": ["mine"]})
        rest = [line for line in lines if line]

    assert "request_aborted" in rest[-1]
    assert not any("[DONE]" in line for line in rest)
