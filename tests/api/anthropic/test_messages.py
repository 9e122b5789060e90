"""Anthropic's API, through its official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from serve.messages import AddRequest
from tests.api.conftest import ANSWER, MODEL, Server
from tests.api.scripted import Script

HI: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def claude(shared_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=shared_server.url, api_key="none", max_retries=0) as client:
        yield client


def rendered(server: Server) -> str:
    request = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))
    return server.tokenizer.decode_now(request.prompt_token_ids, False)


def test_an_answer_has_anthropics_shape(claude: anthropic.Anthropic, server: Server) -> None:
    message = claude.messages.create(model=MODEL, max_tokens=100, messages=HI)

    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert [block.text for block in message.content if block.type == "text"] == [ANSWER]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(server.ids(ANSWER)) + 1
    count = claude.messages.count_tokens(model=MODEL, messages=HI)
    assert count.input_tokens == message.usage.input_tokens


def test_a_stream_tells_the_same_in_anthropics_order(
    claude: anthropic.Anthropic, server: Server
) -> None:
    whole = claude.messages.create(model=MODEL, max_tokens=100, messages=HI)
    with claude.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    raw = claude.messages.create(model=MODEL, max_tokens=100, messages=HI, stream=True)
    names = [event.type for event in raw]

    assert text == ANSWER
    assert [block.text for block in final.content if block.type == "text"] == [ANSWER]
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_reason_for_stopping_is_told(claude: anthropic.Anthropic, server: Server) -> None:
    cut = claude.messages.create(model=MODEL, max_tokens=2, messages=HI)
    stopped = claude.messages.create(
        model=MODEL, max_tokens=100, messages=HI, stop_sequences=[" world"]
    )

    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " world")


def test_system_tools_results_and_a_begun_answer_reach_the_template(
    claude: anthropic.Anthropic, server: Server
) -> None:
    claude.messages.create(
        model=MODEL,
        max_tokens=5,
        system=[{"type": "text", "text": "be kind"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "one"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "5"},
                    {"type": "text", "text": "two"},
                ],
            },
            {"role": "assistant", "content": "three"},
        ],
    )

    assert rendered(server) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\none<|im_end|>\n"
        '<|im_start|>assistant\n[f {"a": 1}]<|im_end|>\n'
        "<|im_start|>tool\n5<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree"
    )


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 0}, 400),
        ({"max_tokens": 10**6}, 400),
        ({"max_tokens": 5, "temperature": -1}, 400),
        ({"max_tokens": 5, "tools": [{"name": "f", "input_schema": {}}]}, 400),
        ({"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}}, 400),
        ({"max_tokens": 5, "messages": []}, 400),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400),
        ({"max_tokens": 5, "model": "nope"}, 404),
        ({}, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_anthropics_shape(
    http: httpx.Client, fields: dict[str, Any], status: int, stream: bool
) -> None:
    response = http.post("/v1/messages", json={"messages": HI, "stream": stream, **fields})

    assert response.status_code == status
    assert response.json()["type"] == "error"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert response.json()["error"]["type"] == kind
    assert response.json()["error"]["message"]


def test_a_failure_in_mid_stream_is_an_error_event(
    claude: anthropic.Anthropic, server: Server
) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=3)

    with (
        pytest.raises(anthropic.APIError, match="blew up"),
        claude.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream,
    ):
        list(stream.text_stream)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("num_results", [0, 9000])
def test_a_conversation_that_becomes_too_little_or_too_much_is_refused(
    server: Server, path: str, num_results: int
) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "b"}
    messages = [{"role": "user", "content": [result] * num_results}]

    with server.http() as http:
        response = http.post(path, json={"messages": messages, "max_tokens": 1})

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "fields",
    [
        {"mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}]},
        {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_would_be_ignored_and_missed_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    refused = http.post(path, json={"messages": HI, "max_tokens": 5, **fields})
    assert refused.status_code == 400
    name = next(iter(fields))
    assert refused.json()["error"]["message"].startswith(name)
    asks_nothing = {"output_config": {"effort": "low"}, "output_format": None, "mcp_servers": []}
    assert http.post(path, json={"messages": HI, "max_tokens": 5, **asks_nothing}).is_success


def test_a_field_at_fault_has_its_name_here(http: httpx.Client) -> None:
    body = {"messages": HI, "max_tokens": 5, "stop_sequences": [""]}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("stop_sequences must not")


def test_api_46_what_clients_of_today_send_is_taken(http: httpx.Client, server: Server) -> None:
    body = {
        "max_tokens": 5,
        "messages": [
            {"role": "system", "content": "first"},
            {"role": "user", "content": "one"},
            {"role": "system", "content": "second"},
            {"role": "user", "content": "two"},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "unheard_of": {"a": [1]},
    }
    assert http.post("/v1/messages?beta=true", json=body).status_code == 200
    assert rendered(server) == (
        "<|im_start|>system\nfirst<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>system\nsecond<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("turns", "fields"),
    [
        (HI, {}),
        (HI, {"system": [{"type": "text", "text": "be kind"}, {"type": "text", "text": "!"}]}),
        ([*HI, {"role": "assistant", "content": "well"}], {}),
    ],
)
def test_api_44_counted_tokens_are_those_of_the_answer(
    claude: anthropic.Anthropic, server: Server, turns: list[Any], fields: dict[str, Any]
) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=turns, **fields)
    usage = claude.messages.create(model=MODEL, messages=turns, max_tokens=2, **fields).usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + (read or 0) + (written or 0)
