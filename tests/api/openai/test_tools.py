"""Tools of chat completions: what is asked, what is refused, and how calls are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serve.config import ServerConfig
from serve.messages import AddRequest
from tests.api.conftest import MODEL, Server, running_server
from tests.api.sse import events

HI: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
ARGUMENTS = '{"a": "\\"</tool_call>\\" 世界 }"}'
ADD = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(ServerConfig(tool_call_parser="hermes"), max_model_len=4096) as server:
        yield server


def post(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": HI, "tools": TOOLS, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


def streamed(server: Server, **fields: Any) -> dict[str, Any]:
    """A stream put together as clients do it; its parts must be as OpenAI's are."""
    content, calls, reasons = "", list[dict[str, Any]](), []
    for event in events(post(server, stream=True, **fields))[:-1]:
        for choice in event["choices"]:
            content += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls", []):
                if call["index"] == len(calls):
                    assert call["id"].startswith("call_")
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert call.keys() == {"index", "function"}
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "calls": calls, "reasons": reasons}


def whole(server: Server, **fields: Any) -> dict[str, Any]:
    choice = post(server, **fields).json()["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "content": message["content"] or None, "calls": calls, "reasons": [choice["finish_reason"]]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "content", "calls", "reason"),
    [
        ("Hello world.", "Hello world.", [], "stop"),
        (ADD, None, [("add", ARGUMENTS)], "tool_calls"),
        (f"Well.\n{ADD}\n{STOP}", "Well.", [("add", ARGUMENTS), ("stop", "{}")], "tool_calls"),
        ("A <tool_call> in prose", "A <tool_call> in prose", [], "stop"),
        (ADD.replace("add", "sub"), ADD.replace("add", "sub"), [], "stop"),
    ],
)
def test_too_01_calls_come_apart_whole_as_streamed(
    server: Server, script: str, content: str | None, calls: list[tuple[str, str]], reason: str
) -> None:
    server.script = script
    wanted = {
        "content": content,
        "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
        "reasons": [reason],
    }
    assert whole(server) == wanted
    assert streamed(server) == wanted
    assert streamed(server, stream_interval=4) == wanted


def test_a_cut_call_is_told_as_far_as_it_came(server: Server) -> None:
    server.script = ADD
    cut = whole(server, max_tokens=60)
    assert cut["reasons"] == ["length"]
    assert cut == streamed(server, max_tokens=60)
    assert ARGUMENTS.startswith(cut["calls"][0]["arguments"])


def test_a_named_choice_ends_with_stop(server: Server) -> None:
    server.script = ADD
    named = {"type": "function", "function": {"name": "add"}}
    for answer in (whole(server, tool_choice=named), streamed(server, tool_choice=named)):
        assert answer["reasons"] == ["stop"]
        assert answer["calls"]


def test_the_client_s_own_helper_reads_the_stream(server: Server) -> None:
    server.script = f"{ADD}\n{STOP}"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model=MODEL, messages=HI, tools=TOOLS) as stream,
    ):
        answer = stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("add", json.loads(ARGUMENTS)), ("stop", {})
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 2


def asked(server: Server) -> AddRequest:
    return next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))


def test_the_prompt_tells_the_tools_and_the_answer_is_held_to_them(server: Server) -> None:
    server.script = "Hello"
    assert post(server).status_code == 200
    request = asked(server)
    prompt = server.tokenizer.decode_now(request.prompt_token_ids)
    assert '"name": "add"' in prompt
    assert request.sampling.grammar is not None
    assert post(server, tool_choice="none").status_code == 200
    request = asked(server)
    assert '"name": "add"' not in server.tokenizer.decode_now(request.prompt_token_ids)
    assert request.sampling.grammar is None


def test_results_of_calls_go_back_into_the_conversation(server: Server) -> None:
    server.script = ADD
    call = post(server).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "42 degrees"}
    server.script = "Hello"
    assert post(server, messages=[*HI, call, result]).status_code == 200
    prompt = server.tokenizer.decode_now(asked(server).prompt_token_ids)
    assert "<tool_response>\n42 degrees" in prompt
    assert '"name": "add", "arguments"' in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [*TOOLS, {"type": "function", "function": {"name": "a b"}}]},
         "tools.2.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
         "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"l": {"type": "array", "uniqueItems": True}}}}}]},
         "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(257)]},
         "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}},
         "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
         "tool_choice.allowed_tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"structured_outputs": {"regex": "a"}}, "tools"),
        ({"guided_json": SCHEMA}, "tools"),
        ({"grammar": 'root ::= "a"'}, "tools"),
    ],
)  # fmt: skip
def test_too_02_what_cannot_be_kept_to_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    refused = post(server, **fields)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_a_response_format_of_text_asks_for_no_form(server: Server) -> None:
    server.script = ADD
    assert whole(server, response_format={"type": "text"})["reasons"] == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_tool_s_schema_is_not_held_to_is_told(server: Server, stream: bool) -> None:
    server.script = "Hello"
    listed = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"l": listed}}}
    tools = [TOOLS[1], {"type": "function", "function": function}]
    answer = post(server, tools=tools, stream=stream)
    assert answer.status_code == 200, answer.text
    place = "/tools/1/function/parameters/properties/l/uniqueItems"
    assert answer.headers["x-serve-relaxed"] == place
    assert "x-serve-relaxed" not in post(server, tools=TOOLS).headers


def test_allowed_tools_are_the_only_ones(server: Server) -> None:
    server.script = STOP
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    answer = whole(server, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (answer["content"], answer["calls"]) == (STOP, [])


def test_without_the_flag_tools_are_refused_naming_it() -> None:
    with running_server() as server:
        refused = post(server)
        assert refused.status_code == 400
        assert "--tool-call-parser" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_routes_refuse_tools(server: Server, path: str) -> None:
    tool = {"name": "add", "input_schema": SCHEMA, "type": "function", "parameters": SCHEMA}
    body = {"input": "a"} if "responses" in path else {"messages": HI, "max_tokens": 5}
    refused = httpx.post(f"{server.url}{path}", json={**body, "tools": [tool]})
    assert refused.status_code == 400, refused.text
    assert "ool" in refused.json()["error"]["message"]
