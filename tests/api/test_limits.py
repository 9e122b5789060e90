"""Everything that a request can make large is bounded, and the served document says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.api.app import BODIES
from serve.api.protocol import bounds
from serve.config import ServerConfig
from serve.messages import AddRequest
from tests.api.conftest import ANSWER, Server, running_server
from tests.api.scripted import Script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hello"}]
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 40},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HI, "max_tokens": 40},
}

# Texts and values without a bound of their own in the document, and what bounds them.
PROMPT_TEXT = "max_model_len times 32 characters, before they are encoded"
BODY = "read by nobody, or only for its kind; what it holds counts to the body's limits"
SCHEMA = "max_schema_bytes"
BOUNDED_ELSEWHERE = {
    "CompletionRequest.prompt": PROMPT_TEXT,
    "ContentPart.text": PROMPT_TEXT,
    "Message.content": PROMPT_TEXT,
    "FunctionCall.arguments": PROMPT_TEXT,
    "TokenizeRequest.prompt": PROMPT_TEXT,
    "PinRequest.prompt": PROMPT_TEXT,
    "InputItem.content": PROMPT_TEXT,
    "InputItem.arguments": PROMPT_TEXT,
    "InputItem.output": PROMPT_TEXT,
    "ResponsesRequest.input": PROMPT_TEXT,
    "ResponsesRequest.instructions": PROMPT_TEXT,
    "InputMessage.content": PROMPT_TEXT,
    "InputBlock.text": PROMPT_TEXT,
    "InputBlock.content": PROMPT_TEXT,
    "CountTokensRequest.system": PROMPT_TEXT,
    "MessagesRequest.system": PROMPT_TEXT,
    "ChatCompletionRequest.response_format": SCHEMA,
    "CompletionRequest.response_format": SCHEMA,
}


def unbounded(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """The fields of a schema that have no bound, by the model's name and theirs."""
    for field, about in schema.get("properties", {}).items():
        path = f"{name}.{field}"
        if path not in BOUNDED_ELSEWHERE and not _is_bounded(about):
            yield path


def _is_bounded(about: dict[str, Any]) -> bool:
    for union in ("anyOf", "oneOf", "allOf"):
        if union in about:
            return all(_is_bounded(member) for member in about[union])
    if about.keys() & {"$ref", "enum", "const"}:
        return True
    match about.get("type"):
        case "string":
            return "maxLength" in about or "pattern" in about
        case "integer":
            return bool(about.keys() & {"maximum", "exclusiveMaximum"})
        case "array":
            return "maxItems" in about and _is_bounded(about["items"])
        case "object":
            return "maxProperties" in about
        case "boolean" | "number" | "null":
            return True
    return False


def reachable(document: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """The schemas of these names, and all that they refer to."""
    schemas, found = document["components"]["schemas"], {}

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                take(node["$ref"].rsplit("/", 1)[1])
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    def take(name: str) -> None:
        if name not in found:
            found[name] = schemas[name]
            visit(schemas[name])

    for name in names:
        take(name)
    return found


def test_every_field_of_every_body_has_a_bound(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        for operations in document["paths"].values()
        for operation in operations.values()
        if "requestBody" in operation
    }
    models = reachable(document, sorted(bodies))

    assert bodies == {model.__name__ for model in BODIES}
    assert [path for name, about in models.items() for path in unbounded(name, about)] == []
    fields = {f"{name}.{f}" for name, about in models.items() for f in about.get("properties", {})}
    assert BOUNDED_ELSEWHERE.keys() <= fields


def test_the_page_of_limits_has_every_number_of_the_protocol() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    numbers = {name: value for name, value in vars(bounds).items() if name.startswith("MAX_")}

    assert len(numbers) > 20
    assert [name for name, value in numbers.items() if f"{value:,}" not in page] == []


@pytest.mark.parametrize(
    "about",
    [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "string", "maxLength": 3}},
        {"type": "array", "maxItems": 3, "items": {"type": "string"}},
        {"type": "object", "additionalProperties": True},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {},
    ],
)
def test_a_field_without_a_bound_is_seen(about: dict[str, Any]) -> None:
    assert list(unbounded("Model", {"properties": {"field": about}})) == ["Model.field"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"stop": "a" * 3_000_000, "n": 10}, "stop"),
        (COMPLETIONS, {"stop": ["ok", "a" * 1025]}, "stop.1"),
        (COMPLETIONS, {"stop": ["a"] * 65}, "stop"),
        (MESSAGES, {"stop_sequences": ["a" * 1025]}, "stop_sequences.0"),
        (MESSAGES, {"stop_sequences": ["a"] * 65}, "stop_sequences"),
        (CHAT, {"n": 129}, "n"),
        (COMPLETIONS, {"n": 128, "prompt": ["a"] * 9}, "n"),
        (CHAT, {"allowed_token_ids": [1] * (2**19 + 1)}, "allowed_token_ids"),
        (COMPLETIONS, {"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
        (COMPLETIONS, {"bad_words": ["a" * 257]}, "bad_words.0"),
        (COMPLETIONS, {"bad_words": ["q" * 65]}, "bad_words"),
        (COMPLETIONS, {"bad_words": ["a"] * 257}, "bad_words"),
        (CHAT, {"messages": HI * 8193}, "messages"),
        (CHAT, {"tools": [{}] * 1025, "tool_choice": "none"}, "tools"),
        (CHAT, {"chat_template_kwargs": {str(i): i for i in range(1025)}}, "chat_template_kwargs"),
        (RESPONSES, {"metadata": {str(i): "" for i in range(65)}}, "metadata"),
        (MESSAGES, {"metadata": {str(i): "" for i in range(65)}}, "metadata"),
        (CHAT, {"user": "u" * 1025}, "user"),
    ],
)
def test_sec_42_sec_47_what_is_too_long_is_a_400_that_names_the_field(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = http.post(path, json={**USUAL[path], **fields})

    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert param in error["message"] if path == MESSAGES else error["param"] == param
    assert len(refused.content) < 1000


def test_what_clients_really_send_passes() -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 1000
    stops = ["x" * 1024] * 64
    body = {"messages": turns, "stop": stops, "truncate_prompt_tokens": 9, "max_tokens": 3}

    with running_server(max_model_len=2**15) as server, server.http() as http:
        assert http.post(CHAT, json=body).status_code == 200


def test_sec_42_stop_strings_stay_in_the_front_and_end_every_choice(
    http: httpx.Client, server: Server
) -> None:
    body = {"prompt": "Hello", "n": 3, "stop": [" Grü", "z" * 1024], "max_tokens": 40}
    answer = http.post(COMPLETIONS, json=body).json()

    assert [choice["text"] for choice in answer["choices"]] == [" Hello world."] * 3
    assert {choice["stop_reason"] for choice in answer["choices"]} == {" Grü"}
    sent = [m for m in server.client.received if isinstance(m, AddRequest)][-3:]
    assert [message.sampling.stop for message in sent] == [()] * 3


LONG_TEXT = "x" * (512 * 32 + 1)
LONG_TURN = [{"role": "user", "content": LONG_TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": LONG_TURN}),
        (CHAT, {"messages": LONG_TURN, "truncate_prompt_tokens": -1}),
        (COMPLETIONS, {"prompt": ["a", LONG_TEXT]}),
        (COMPLETIONS, {"prompt": LONG_TEXT, "truncate_prompt_tokens": 5}),
        (RESPONSES, {"input": LONG_TEXT, "truncation": "auto"}),
        (RESPONSES, {"input": "a", "instructions": LONG_TEXT}),
        (MESSAGES, {"messages": LONG_TURN, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": LONG_TURN}),
        ("/tokenize", {"prompt": LONG_TEXT}),
        ("/tokenize", {"messages": LONG_TURN}),
        ("/v1/prefix_cache/pin", {"prompt": LONG_TEXT}),
        ("/v1/prefix_cache/pin", {"messages": LONG_TURN}),
    ],
)
def test_sec_44_no_route_encodes_a_text_that_cannot_fit(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(server.tokenizer, "encode_now", lambda text, *_, **__: encoded.append(text))

    refused = http.post(path, json=body)

    assert refused.status_code == 400, refused.text
    assert "characters is read" in refused.json()["error"]["message"]
    assert encoded == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"n": 20, "max_tokens": 100}, "n"),
        (COMPLETIONS, {"logprobs": 20, "max_tokens": 100}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "a" * 200, "prompt_logprobs": 9}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a" * 200, "n": 7, "stream": True}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 30, "max_tokens": 40}, "prompt"),
    ],
)
def test_sec_46_an_answer_that_could_grow_too_large_is_refused_before_it_begins(
    path: str, fields: dict[str, Any], param: str
) -> None:
    with running_server(ServerConfig(max_answer_entries=1000)) as server, server.http() as http:
        refused = http.post(path, json={**USUAL[path], **fields})
        plain = http.post(path, json=USUAL[path])
        streamed = {"n": 20, "max_tokens": 100, "stream": True}
        flows = http.post(COMPLETIONS, json={"prompt": "a", **streamed})

    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert "--max-answer-entries" in refused.json()["error"]["message"]
    assert (plain.status_code, flows.status_code) == (200, 200)


def test_sec_47_lists_are_deduplicated_and_bounded_over_all_choices(
    http: httpx.Client, server: Server
) -> None:
    body = {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [3, 1, 3] * 1000}

    assert http.post(COMPLETIONS, json={**body, "stop_token_ids": [5, 5]}).status_code == 200
    sent = server.client.received[-1]
    assert isinstance(sent, AddRequest)
    assert sent.sampling.allowed_token_ids == (3, 1)
    assert sent.sampling.stop_token_ids.count(5) == 1
    words = ["a" * 32 + chr(97 + i % 26) * (i % 32) for i in range(256)]
    refused = http.post(COMPLETIONS, json={"prompt": "a", "n": 128, "bad_words": words})
    assert refused.json()["error"]["param"] == "bad_words"


@pytest.mark.parametrize("path", USUAL)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dry_multiplier": 0.8, "dry_base": 1.75}, "dry_multiplier"),
        ({"dry_allowed_length": 5}, "dry_allowed_length"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"xtc_threshold": 0.3}, "xtc_threshold"),
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat_mode": 1, "mirostat_tau": 4}, "mirostat_mode"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"typical": 0.5}, "typical"),
        ({"top_n_sigma": 1.5}, "top_n_sigma"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"n_predict": 5}, "n_predict"),
        ({"tfs_z": 0}, "tfs_z"),
        ({"do_sample": False}, "do_sample"),
        ({"structural_tag": "{}"}, "structural_tag"),
    ],
)
def test_a_sampling_field_that_is_not_had_is_refused_by_its_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    refused = http.post(path, json={**USUAL[path], **fields})

    assert refused.status_code == 400, refused.text
    assert param in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("seed", 7, None),
        ("n", 2, 1),
        ("stop", ["x"], []),
        ("logit_bias", {"5": 3}, {}),
        ("min_tokens", 5, 0),
        ("min_p", 0.1, 0),
        ("bad_words", ["x"], []),
        ("frequency_penalty", 0.5, 0.0),
        ("repetition_penalty", 1.2, 1.0),
        ("ignore_eos", True, False),
        ("allowed_token_ids", [1], None),
        ("guided_json", {"type": "object"}, None),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
    ],
)
def test_a_field_that_only_other_routes_have_is_not_ignored(
    http: httpx.Client, path: str, field: str, value: Any, neutral: Any
) -> None:
    refused = http.post(path, json={**USUAL[path], field: value})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["message"].startswith((field, "output_config.format"))
    assert http.post(path, json={**USUAL[path], field: neutral}).is_success


def test_a_path_with_a_slash_too_many_leads_nowhere_else(http: httpx.Client) -> None:
    for path in ("/v1/requests", "/v1/models/", "/health/"):
        assert http.get(path).status_code == 404


@pytest.mark.parametrize("path", USUAL)
def test_fields_that_are_off_or_only_describe_are_accepted(http: httpx.Client, path: str) -> None:
    off = {
        "dry_multiplier": 0,
        "dry_base": 1.8,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0.0,
        "xtc_threshold": 0.2,
        "mirostat": 0,
        "mirostat_tau": 8,
        "typical_p": 1,
        "tfs_z": 1.0,
        "top_n_sigma": -1,
        "repeat_penalty": 1.0,
        "repeat_last_n": 256,
        "logits_processors": None,
        "samplers": [],
        "do_sample": True,
        "length_penalty": 1.0,
    }
    described = {"service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "b"}

    answered = http.post(path, json={**USUAL[path], **off, **described})

    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("includes", [False, True])
def test_api_43_a_stop_string_that_is_a_special_token_ends_the_answer(
    http: httpx.Client, server: Server, includes: bool
) -> None:
    start = server.tokenizer.tokens.special_id("<|im_start|>")
    assert start is not None
    server.script = [*server.ids(" Hello"), start, *server.ids(" world")]
    body = {
        "prompt": "a",
        "max_tokens": 40,
        "stop": ["zz", "<|im_start|>"],
        "include_stop_str_in_output": includes,
        "logprobs": 0,
    }

    for fields in ({}, {"skip_special_tokens": False}):
        answer = http.post(COMPLETIONS, json={**body, **fields}).json()
        (choice,) = answer["choices"]
        assert choice["text"] == " Hello" + ("<|im_start|>" if includes else "")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|im_start|>")
        assert answer["usage"]["completion_tokens"] == 2
        assert len(choice["logprobs"]["tokens"]) == 2
    late = http.post(COMPLETIONS, json={**body, "min_tokens": 2}).json()
    assert late["choices"][0]["text"] == " Hello world"
    assert http.post(COMPLETIONS, json={**body, "stop": ["<|im_end|>"]}).status_code == 200


def test_sec_46_a_large_answer_is_written_in_slices(server: Server, http: httpx.Client) -> None:
    server.script = lambda request: Script(server.ids(ANSWER) * 40)
    ids = server.ids(ANSWER) * 20
    body = {"prompt": ids[:200], "max_tokens": 250, "n": 8, "logprobs": 20, "echo": True}

    whole = http.post(COMPLETIONS, json={**body, "prompt_logprobs": 2})

    assert whole.status_code == 200, whole.text[:300]
    assert int(whole.headers["content-length"]) == len(whole.content)
    choices = whole.json()["choices"]
    assert len(choices) == 8
    for choice in choices:
        lengths = {len(column) for column in choice["logprobs"].values()}
        assert lengths == {450}
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == 200
        assert "".join(choice["logprobs"]["tokens"]).startswith(ANSWER[:13])
