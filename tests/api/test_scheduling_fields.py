"""What a request may say about its scheduling, and what it is told when it cannot be scheduled."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve.messages import AddRequest
from tests.api.conftest import Server, running_server
from tests.api.scripted import Script

PROMPTS = {
    "/v1/completions": {"prompt": "one two"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two"}]},
}
EVERY_API = {
    **PROMPTS,
    "/v1/responses": {"input": "one two"},
    "/v1/messages": {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 5},
}


def last_added(server: Server) -> AddRequest:
    return [m for m in server.client.received if isinstance(m, AddRequest)][-1]


@pytest.mark.parametrize("path", PROMPTS)
def test_a_priority_without_the_policy_is_refused_and_zero_is_not(
    http: httpx.Client, path: str
) -> None:
    refused = http.post(path, json={**PROMPTS[path], "priority": -2})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in refused.json()["error"]["message"]
    assert http.post(path, json={**PROMPTS[path], "priority": 0}).status_code == 200


@pytest.mark.parametrize("path", PROMPTS)
def test_priority_and_salt_reach_the_engine(path: str) -> None:
    with running_server(scheduling_policy="priority") as server, server.http() as http:
        body = {**PROMPTS[path], "priority": -2, "cache_salt": "tenant"}
        assert http.post(path, json=body).status_code == 200
        assert (last_added(server).priority, last_added(server).cache_salt) == (-2, "tenant")


@pytest.mark.parametrize("path", PROMPTS)
def test_a_request_may_do_without_drafts(server: Server, http: httpx.Client, path: str) -> None:
    for wish, wanted in (({}, True), ({"speculative": False}, False)):
        assert http.post(path, json={**PROMPTS[path], **wish}).status_code == 200
        assert last_added(server).sampling.speculative is wanted
    refused = http.post(path, json={**PROMPTS[path], "speculative": "no"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculative")


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    server: Server, http: httpx.Client, path: str, stream: bool
) -> None:
    server.script = Script([], refuse_for_s=7.0)
    body: dict[str, Any] = {**PROMPTS[path], "stream": stream}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(("retry_after_s", "status"), [(None, 504), (3.0, 503)])
@pytest.mark.parametrize("stream", [False, True])
def test_expired_work_is_refused_with_504_or_503(
    server: Server, http: httpx.Client, retry_after_s: float | None, status: int, stream: bool
) -> None:
    server.script = Script([], expires=True, refuse_for_s=retry_after_s)
    answer = http.post("/v1/completions", json={"prompt": "one", "timeout": 2.5, "stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == (None if retry_after_s is None else "3")
    assert last_added(server).timeout_s == 2.5
    assert 'finished_reason="timeout"' in http.get("/metrics").text


@pytest.mark.parametrize("path", EVERY_API)
def test_the_timeout_may_be_a_header(server: Server, http: httpx.Client, path: str) -> None:
    assert http.post(path, json=EVERY_API[path], headers={"timeout": "7.5"}).status_code == 200
    assert last_added(server).timeout_s == 7.5
    for wrong in ("0", "-1", "soon", "1e9", "nan"):
        assert http.post(path, json=EVERY_API[path], headers={"timeout": wrong}).status_code == 400
