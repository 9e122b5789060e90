"""Answers in a form, from real servers: always valid, on every route, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pydantic
import pytest

from serve import LLM, SamplingParams
from serve.answers.forms import json_form
from serve.sampling_params import Grammar
from tests.e2e.server_process import ServerProcess

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 7, "maximum": 700}]},
    {"type": "string", "pattern": "^[a-f]{2,6}$"},
    {"type": "string", "format": "date"},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/p"}}, "required": ["x"],
     "additionalProperties": False,
     "$defs": {"p": {"type": "array", "prefixItems": [{"type": "number"}, {"const": "é\n\"q"}],
                     "items": False, "minItems": 2}}},
    {"enum": [1, "one", None, {"a": [True]}]},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
     "required": ["next"], "additionalProperties": False},
]  # fmt: skip
HI = [{"role": "user", "content": "Give me one."}]


def check(schema: Any, text: str) -> None:
    """It is JSON, and fits."""
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def finished_share(model: Path, schemas: list[dict[str, Any]], num_seeds: int) -> float:
    """Answers a random model at temperature 1 for each schema and seed; each that ends must fit.
    The share of those that end."""
    wishes = [
        SamplingParams(
            max_tokens=400, temperature=1.0, seed=seed, grammar=Grammar(text=json_form(schema))
        )
        for schema in schemas
        for seed in range(num_seeds)
    ]
    with LLM(str(model), device="cpu", max_num_seqs=64) as llm:
        answers = llm.generate(["x"] * len(wishes), wishes)
    finished = 0
    for number, answer in enumerate(answers):
        assert answer.error is None, answer.error
        if answer.finish_reason == "stop":
            finished += 1
            check(schemas[number // num_seeds], answer.text)
    return finished / len(answers)


def test_every_finished_answer_of_a_random_model_fits_its_schema(tiny_model: Path) -> None:
    assert finished_share(tiny_model, SCHEMAS, 12) >= 0.8


@pytest.mark.slow
def test_every_finished_answer_of_two_thousand_fits_its_schema(tiny_model: Path) -> None:
    assert finished_share(tiny_model, SCHEMAS, 250) >= 0.8


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, **more}}


@pytest.fixture(scope="module")
def client(tiny_server: ServerProcess) -> Iterator[openai.OpenAI]:
    url = f"{tiny_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_server.url, timeout=60) as client:
        yield client


class Person(pydantic.BaseModel):
    """What `parse` of the client is given."""

    age: int
    likes_it: bool


def test_the_client_parses_answers_of_chat_and_responses_whole_and_streamed(
    client: openai.OpenAI,
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "seed": 3}
    parsed = client.chat.completions.parse(messages=HI, response_format=Person, **asked)  # type: ignore[arg-type]
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with client.chat.completions.stream(messages=HI, response_format=Person, **asked) as stream:  # type: ignore[arg-type]
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed
    answer = client.responses.parse(
        model="tiny", input="Give me one.", text_format=Person, max_output_tokens=300
    )
    assert isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_s_output_format_is_kept_to(tiny_server: ServerProcess, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "max_tokens": 400, "messages": HI,
        "extra_body": {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=tiny_server.url, api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    assert message.stop_reason == "end_turn"
    block = message.content[0]
    assert block.type == "text"
    check(PERSON, block.text)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[0-9]{3}-(a|b)"}}, "[0-9]{3}-(a|b)"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"json": '{"const": 1}'}}, "1"),
        ({"structured_outputs": {"json": {"type": "object", "properties": {"a": {"const": 1}},
                                          "required": ["a"]},
                                 "disable_any_whitespace": True,
                                 "disable_additional_properties": True}}, r'\{"a":1\}'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "a{4}"}, "aaaa"),
        ({"guided_json": {"enum": [5]}}, "5"),
        ({"guided_grammar": 'start: "q"'}, "q"),
        ({"grammar": 'root ::= "x" "y"'}, "xy"),
        ({"json_schema": {"enum": ["v"]}}, '"v"'),
        ({"regex": "b{2}"}, "bb"),
        ({"ebnf": 'root ::= "m"'}, "m"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_sto_02_every_spelling_of_a_form_is_kept_to(
    http: httpx.Client, path: str, fields: dict[str, Any], pattern: str
) -> None:
    ask: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "One:"}
    # The form wins over what would make the answer longer.
    answer = http.post(path, json={**ask, "max_tokens": 300, "seed": 1, "min_tokens": 50,
                                   "ignore_eos": True, **fields})  # fmt: skip
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, text, re.DOTALL), text
    else:
        assert fields == {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": response_format({"type": "array", "uniqueItems": True}, strict=True)},
         "response_format.json_schema.schema"),
        ({"response_format": response_format({"type": "nothing"})},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "regex": "b"}, "regex"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"json_schema": {"x-guidance": {"lenient": True}, "uniqueItems": True, "type": "array"}},
         "json_schema"),
    ],
)  # fmt: skip
def test_sto_04_what_cannot_be_enforced_is_refused_by_the_name_of_its_field(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    refused = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 5, **fields})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_strict_is_kept_to_as_far_as_can_be_and_the_rest_is_told(
    http: httpx.Client, stream: bool
) -> None:
    schema = {
        "type": "array",
        "items": {"oneOf": [{"enum": [1, 2]}, {"enum": [2]}], "format": "a\r\nb"},
        "uniqueItems": True,
        "maxItems": 3,
    }
    answer = http.post(
        "/v1/chat/completions",
        json={"messages": HI, "response_format": response_format(schema), "stream": stream},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-serve-relaxed"] == "/items/format, /uniqueItems, /items/oneOf"


def hostile() -> dict[str, Any]:
    deep: Any = {"type": "string"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    doubling = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
        for i in range(30)
    }
    return {
        "deep": deep,
        "wide": {"enum": [f"item {i}" for i in range(30_000)]},
        "long": {"const": "x" * 300_000},
        "huge bounds": {"type": "array", "minItems": 10**6, "maxItems": 10**9},
        "doubling": {"$ref": "#/$defs/d0", "$defs": {**doubling, "d30": {"type": "string"}}},
        "product": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in "ab"]}
                              for i in range(16)]},
        "optional": {"type": "object", "properties": {f"p{i}": {"type": "null"}
                                                      for i in range(500)}},
        "itself": {"$ref": "#"},
    }  # fmt: skip


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_schema_costs_nobody_else_anything(http: httpx.Client, name: str) -> None:
    asked = {"messages": HI, "max_tokens": 4, "response_format": response_format(hostile()[name])}
    with ThreadPoolExecutor() as pool:
        attack = pool.submit(http.post, "/v1/chat/completions", json=asked)
        plain = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 4})
        assert plain.status_code == 200
        assert attack.result().status_code in (200, 400), attack.result().text
    assert http.get("/health").status_code == 200
