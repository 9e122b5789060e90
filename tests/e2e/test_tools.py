"""The default model calls tools, through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e.server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with ServerProcess(["--port", "0", "--tool-call-parser", "hermes"]) as server:
        server.wait_ready()
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        assert server.stop() == 0, server.log


def test_too_03_required_calls_are_valid_at_any_seed(client: openai.OpenAI) -> None:
    for seed in range(6):
        answer = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=ASKED, tools=TOOLS, tool_choice="required",
            parallel_tool_calls=False, seed=seed, temperature=1.0, max_tokens=120,
        )  # fmt: skip
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_the_result_of_a_call_is_answered(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "tools": TOOLS, "temperature": 0}
    named = {"type": "function", "function": {"name": "get_weather"}}
    called = client.chat.completions.create(messages=ASKED, tool_choice=named, **asked)
    message = called.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    history = [*ASKED, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(messages=history, max_tokens=60, **asked)
    assert "18" in (answer.choices[0].message.content or "")
