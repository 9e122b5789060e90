"""Pinning prefixes over HTTP, over a real scheduler and cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.scheduler.invariants import check_scheduler
from tests.api.stepped import SteppedClient, stepped_server
from tests.fakes import FakeExecutor

NUM_BLOCKS, BLOCK = 64, 4
PIN = "/v1/prefix_cache/pin"


@contextmanager
def opened(
    *, max_model_len: int = 160, **cache: Any
) -> Iterator[tuple[httpx.Client, SteppedClient]]:
    """A server whose engine runs on by itself."""
    executor = FakeExecutor(
        num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_batched_tokens=32,
        max_model_len=max_model_len,
    )  # fmt: skip
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK, **cache), scheduler=SchedulerConfig(max_num_seqs=4)
    )
    with stepped_server(executor, config) as (server, engine), server.http() as http:
        server.on_loop(lambda: engine.allow(1_000_000))
        yield http, engine


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[httpx.Client, SteppedClient]]:
    with opened() as both:
        yield both


@pytest.fixture
def http(stage: tuple[httpx.Client, SteppedClient]) -> Iterator[httpx.Client]:
    client, engine = stage
    yield client
    for pin in client.get(PIN).json()["data"]:
        assert client.delete(f"{PIN}/{pin['id']}").status_code == 200
    client.post("/reset_prefix_cache")
    check_scheduler(engine.core.scheduler)


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def flood(http: httpx.Client) -> None:
    """Prompts enough to have every block that is free used for something else."""
    for number in range(8):
        text = "".join(chr(ord("A") + number) for _ in range(100))
        ok(http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}))


def cached_tokens(http: httpx.Client, prompt: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    usage = ok(http.post("/v1/completions", json=body))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_pinned_prompt_is_there_whatever_came_since(http: httpx.Client) -> None:
    prompt = "a stitch in time saves nine"  # 27 tokens
    pinned = ok(http.post(PIN, json={"prompt": prompt}))
    assert pinned["num_tokens"] == pinned["num_blocks"] * BLOCK
    assert pinned["num_cached_blocks"] == pinned["num_blocks"] == pinned["num_pinned_blocks"] >= 4
    assert pinned["expires_in_s"] is None
    flood(http)
    assert cached_tokens(http, prompt + " and more") >= pinned["num_tokens"]
    assert ok(http.delete(f"{PIN}/{pinned['id']}"))["deleted"] is True
    flood(http)
    assert cached_tokens(http, prompt + " and more") == 0


def test_the_same_prefix_is_the_same_pin_however_it_is_given(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": "be brief and kind and true"}]
    first = ok(http.post(PIN, json={"messages": messages, "ttl": 900}))
    ids = ok(http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}))
    second = ok(http.post(PIN, json={"token_ids": ids["tokens"]}))
    assert second["id"] == first["id"]
    assert (first["expires_in_s"], second["expires_in_s"]) == (pytest.approx(900, abs=60), None)
    assert second["num_pins"] == 1
    salted = ok(http.post(PIN, json={"token_ids": ids["tokens"], "cache_salt": "mine"}))
    assert salted["id"] != first["id"]
    listed = ok(http.get(PIN))
    assert {pin["id"] for pin in listed["data"]} == {first["id"], salted["id"]}
    assert listed["num_pinned_blocks"] == first["num_blocks"] + salted["num_blocks"]


def test_a_time_to_live_ends(stage: tuple[httpx.Client, SteppedClient], http: httpx.Client) -> None:
    ok(http.post(PIN, json={"prompt": "short lived", "ttl": 1e-6}))
    assert ok(http.get(PIN))["data"] == []


def test_beyond_the_cap_a_pin_is_refused_with_the_figures(http: httpx.Client) -> None:
    ok(http.post(PIN, json={"prompt": "x" * 40}))  # 10 of 16 blocks
    refused = http.post(PIN, json={"prompt": "y" * 40})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "needs 10 blocks more; 10 of at most 16 are pinned, of 64 in all" in message
    assert "--max-pinned-share" in message
    assert len(ok(http.get(PIN))["data"]) == 1


def test_what_one_request_may_need_is_never_pinned() -> None:
    with opened(max_model_len=NUM_BLOCKS * BLOCK, max_pinned_share=1.0) as (http, _):
        refused = http.post(PIN, json={"prompt": "x" * 40})
        assert refused.status_code == 400
        assert "0 of at most 0 are pinned" in refused.json()["error"]["message"]
    with opened(max_model_len=240, max_pinned_share=1.0) as (http, _):
        assert ok(http.post(PIN, json={"prompt": "x" * 16}))["max_pinned_blocks"] == 4
        body = {"prompt": "z" * 200, "max_tokens": 40, "ignore_eos": True}  # all that is not pinned
        assert ok(http.post("/v1/completions", json=body))["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "a", "token_ids": [1]}, "token_ids"),
        ({"prompt": "abc"}, None),  # not a full block
        ({"token_ids": [10**12] * 8}, "token_ids.0"),
        ({"token_ids": [1] * 500}, "token_ids"),  # more than the context
        ({"token_ids": [-1] * 8}, "token_ids.0"),
        ({"prompt": "x" * 500}, "prompt"),  # more than the context
        ({"prompt": "long enough", "ttl": 0}, "ttl"),
        ({"prompt": "long enough", "cache_salt": "a/b"}, "cache_salt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
    ],
)
def test_what_cannot_be_pinned_is_a_400_and_leaves_nothing(
    http: httpx.Client, body: dict[str, Any], param: str | None
) -> None:
    refused = http.post(PIN, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert ok(http.get(PIN))["num_pins"] == 0


def test_an_unknown_pin_and_another_model_are_404s(http: httpx.Client) -> None:
    assert http.delete(f"{PIN}/pin-0").status_code == 404
    assert http.post(PIN, json={"prompt": "long enough", "model": "x"}).status_code == 404


def test_without_a_prefix_cache_pinning_says_so() -> None:
    with opened(enable_prefix_caching=False) as (http, _):
        refused = http.post(PIN, json={"prompt": "long enough"})
    assert refused.status_code == 400
    assert "prefix cache is off" in refused.json()["error"]["message"]


def test_a_reset_forgets_all_but_what_is_pinned_and_says_how_much(http: httpx.Client) -> None:
    pinned = ok(http.post(PIN, json={"prompt": "kept for ever"}))
    cached_tokens(http, "this will be forgotten")
    told = ok(http.post("/reset_prefix_cache"))
    assert told["num_blocks_forgotten"] >= 4
    assert (told["num_pins"], told["num_pinned_blocks"]) == (1, pinned["num_blocks"])
    assert cached_tokens(http, "this will be forgotten") == 0
    assert cached_tokens(http, "kept for ever and ever") > 0


def test_met_05_pinned_and_cached_blocks_are_not_in_use(http: httpx.Client) -> None:
    pinned = ok(http.post(PIN, json={"prompt": "kept for ever"}))
    metrics = http.get("/metrics").text
    values = {
        line.split("{")[0].removeprefix("serve_llm_"): float(line.split()[-1])
        for line in metrics.splitlines()
        if not line.startswith("#")
    }
    assert values["kv_cache_usage_perc"] == 0
    assert values["prefix_cache_pinned_blocks"] == pinned["num_blocks"]
    assert values["prefix_cache_blocks"] >= pinned["num_blocks"]


SYSTEM = "you are a helpful assistant with a long memory"


def messages_with(mark: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    system = {"type": "text", "text": SYSTEM, **({"cache_control": mark} if mark else {})}
    turn = {"role": "user", "content": "hi"}
    return {"max_tokens": 1, "system": [system], "messages": [turn], **fields}


@pytest.mark.parametrize(("mark", "seconds"), [({}, 300), ({"ttl": "1h"}, 3600)])
def test_anthropics_cache_control_pins_what_is_before_it(
    http: httpx.Client, mark: dict[str, str], seconds: float
) -> None:
    body = messages_with({"type": "ephemeral", **mark})
    ok(http.post("/v1/messages", json=body))
    (pin,) = ok(http.get(PIN))["data"]
    assert len(SYSTEM) // BLOCK <= pin["num_blocks"] == pin["num_cached_blocks"]
    assert pin["expires_in_s"] == pytest.approx(seconds, abs=60)
    flood(http)
    body["messages"][0]["content"] = "another question"
    usage = ok(http.post("/v1/messages", json=body))["usage"]
    assert usage["cache_read_input_tokens"] >= pin["num_tokens"]
    assert len(ok(http.get(PIN))["data"]) == 1


def test_api_42_44_what_a_mark_writes_and_reads_is_told_at_the_start_of_a_stream_too(
    http: httpx.Client,
) -> None:
    body = messages_with({"type": "ephemeral"})
    total = ok(http.post("/v1/messages/count_tokens", json=body))["input_tokens"]
    fields = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")

    def told(stream: bool) -> list[tuple[int, ...]]:
        answer = http.post("/v1/messages", json={**body, "stream": stream})
        if not stream:
            return [tuple(ok(answer)["usage"][name] for name in fields)]
        lines = answer.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert events[0]["type"] == "message_start"
        usages = [events[0]["message"]["usage"], events[-2]["usage"]]
        return [tuple(usage[name] for name in fields) for usage in usages]

    (first,) = told(stream=False)
    assert first[1] >= len(SYSTEM) // BLOCK * BLOCK
    assert first[2] == 0
    start, end = told(stream=True)
    (whole,) = told(stream=False)
    assert start == end == whole
    assert start[1] == 0
    assert start[2] >= first[1]
    assert sum(first) == sum(start) == total
    ok(http.post("/reset_prefix_cache"))  # forgets all but what is pinned
    body["messages"][0]["content"] = "another question"
    ((_, written, read),) = told(stream=False)
    assert (written, read) == (0, first[1])


def test_what_is_not_marked_is_not_told_as_written(http: httpx.Client) -> None:
    usage = ok(http.post("/v1/messages", json=messages_with(None)))["usage"]
    assert usage["cache_creation_input_tokens"] == 0


def test_a_mark_in_a_turn_covers_the_turns_before_it(http: httpx.Client) -> None:
    marked = {"type": "text", "text": "remember this", "cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [marked, {"type": "text", "text": "but not this"}]},
    ]
    ok(http.post("/v1/messages", json={"max_tokens": 1, "messages": turns}))
    (pin,) = ok(http.get(PIN))["data"]
    assert pin["num_tokens"] > len("one" + "two")


def test_a_mark_that_cannot_be_pinned_is_no_error(http: httpx.Client) -> None:
    ok(http.post(PIN, json={"prompt": "x" * 60}))
    ok(http.post("/v1/messages", json=messages_with({"type": "ephemeral"})))
    assert ok(http.get(PIN))["num_pins"] == 1
    wrong = http.post("/v1/messages", json=messages_with({"type": "eternal"}))
    assert wrong.status_code == 400


def test_no_mark_pins_nothing(http: httpx.Client) -> None:
    ok(http.post("/v1/messages", json=messages_with(None)))
    assert ok(http.get(PIN))["num_pins"] == 0
