"""What is kept of answers, and for how long."""

from __future__ import annotations

import gc
import re
import tracemalloc
from typing import Any

import pytest

from serve.api.errors import NoSuchItem, NotStored
from serve.api.openai.response_store import ResponseStore, StoredItem, StoredResponse
from serve.config import ServerConfig
from serve.errors import ConfigError
from tests.api.conftest import running_server


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def store(clock: Clock | None = None, **limits: Any) -> ResponseStore:
    return ResponseStore(ServerConfig(**limits), clock or Clock())


def item(name: str, size: int = 10, *, is_ours: bool = True) -> StoredItem:
    return StoredItem(name, b"x" * size, is_ours)


def response(*given: StoredItem, size: int = 100) -> StoredResponse:
    return StoredResponse(given, (), b"y" * size)


def why_gone(kept: ResponseStore, name: str) -> str:
    with pytest.raises(NotStored) as gone:
        kept.get(name)
    return str(gone.value)


def test_the_least_recently_used_goes_first_and_is_said_to_be_gone() -> None:
    kept = store(max_stored_responses=2)
    kept.put("a", response())
    kept.put("b", response())
    kept.get("a")
    kept.put("c", response())
    assert "--max-stored-responses 2" in why_gone(kept, "b")
    assert kept.get("a")
    assert kept.get("c")
    kept.delete("a")
    assert "deleted" in why_gone(kept, "a")
    assert "stored here" in why_gone(kept, "never")


def test_bytes_are_limited_and_one_that_is_too_large_displaces_nobody() -> None:
    kept = store(max_stored_bytes=19_000)
    for name in "abc":
        kept.put(name, response(item(name, 5000)))
    assert "--max-stored-bytes 19000" in why_gone(kept, "a")
    assert kept.num_bytes <= 19_000
    kept.put("huge", response(item("huge", 20_000)))
    assert "too many" in why_gone(kept, "huge")
    assert kept.get("b")
    assert kept.get("c")


def test_what_nobody_uses_for_long_is_forgotten() -> None:
    clock = Clock()
    kept = store(clock, stored_response_ttl=60)
    kept.put("a", response(item("i")))
    kept.put("b", response())
    clock.now += 50
    kept.get("a")
    clock.now += 50
    assert "--stored-response-ttl" in why_gone(kept, "b")
    assert kept.item("i", "input.0.id").id == "i"
    clock.now += 61
    with pytest.raises(NoSuchItem):
        kept.item("i", "input.0.id")
    assert kept.num_bytes == 0


def test_items_that_answers_share_count_once_and_stay_until_the_last_of_them_goes() -> None:
    kept, shared, foreign = store(), item("msg_1", 5000), item("mine", is_ours=False)
    kept.put("a", response(shared, foreign))
    alone = kept.num_bytes
    kept.put("b", response(shared, foreign))
    assert alone < kept.num_bytes < alone + 5000
    kept.delete("a")
    assert kept.item("msg_1", "id") is shared
    with pytest.raises(NoSuchItem):
        kept.item("mine", "id")  # a name that a client gave
    kept.delete("b")
    with pytest.raises(NoSuchItem):
        kept.item("msg_1", "id")
    assert kept.num_bytes == 0


@pytest.mark.parametrize(("num_items", "size"), [(2000, 0), (1, 1_000_000)])
def test_sec_43_what_is_counted_is_what_is_held(num_items: int, size: int) -> None:
    kept = store(max_stored_bytes=10**9)
    gc.collect()
    tracemalloc.start()
    for i in range(4):
        items = tuple(
            StoredItem(f"msg_{i:08}_{j:024}", b"z" * size, is_ours=True) for j in range(num_items)
        )
        kept.put(f"resp_{i}", StoredResponse(items, (), b"y" * 1000))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.num_bytes / 3 <= held <= kept.num_bytes * 1.05


@pytest.mark.parametrize(
    "items",
    [
        [
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "ARGUMENTS"},
            {"role": "user", "content": "a"},
        ],
        [{"role": "user", "content": ""}] * 400,
        [{"role": "user", "content": [{"type": "text", "text": "a", "extra": "b" * 200_000}]}],
    ],
)
def test_sec_43_nothing_that_a_request_brings_escapes_the_limit(items: list[Any]) -> None:
    items = [
        {**each, "arguments": f'{{"a": "{"b" * 200_000}"}}'} if "arguments" in each else each
        for each in items
    ]
    config = ServerConfig(max_stored_bytes=1_000_000, disable_log_requests=True)
    body = {"input": items, "max_output_tokens": 1}
    with (
        running_server(config, max_model_len=10**6, num_blocks=10**6) as server,
        server.http() as http,
    ):
        ids = [http.post("/v1/responses", json=body).json()["id"] for _ in range(8)]
        answers = [http.get(f"/v1/responses/{each}") for each in ids]
    statuses = [answer.status_code for answer in answers]
    first = answers[0].json()["error"]["message"]
    assert re.search("not kept any more.*--max-stored-bytes 1000000", first)
    assert statuses == sorted(statuses, reverse=True)
    assert statuses[-1] == 200
    assert 1 <= statuses.count(200) <= 6


def test_limits_that_cannot_work_are_refused() -> None:
    for name, value in (("max_stored_bytes", -1), ("stored_response_ttl", 0)):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            ServerConfig(**{name: value})


def test_a_conversation_that_outgrew_a_request_is_not_gone_on_from() -> None:
    config = ServerConfig(max_request_bytes=4000)
    with running_server(config) as server, server.http() as http:
        body: dict[str, Any] = {"input": "a" * 150, "max_output_tokens": 1, "truncation": "auto"}
        for _ in range(12):
            answer = http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            body["previous_response_id"] = answer.json()["id"]
        refused = http.post("/v1/responses", json={**body, "truncation": "disabled"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")
    assert "--max-request-bytes" in error["message"]
