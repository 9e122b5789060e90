"""`--reasoning-parser`: what a model thinks aloud comes apart from its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serve.config import ServerConfig
from tests.api.conftest import MODEL, Server, running_server
from tests.api.scripted import TEMPLATE
from tests.api.sse import events

HI: list[Any] = [{"role": "user", "content": "Hello"}]
THOUGHT = "\nOne and 世界.\n"
OPENED = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    with running_server(ServerConfig(reasoning_parser="deepseek_r1")) as server:
        yield server


def ask(server: Server, script: str, **fields: Any) -> dict[str, Any]:
    """The message of a whole answer; a stream of it must say the same."""
    server.script = script
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json={"messages": HI, **fields})
    assert whole.status_code == 200, whole.text
    message: dict[str, Any] = whole.json()["choices"][0]["message"]
    for interval in (1, 3):
        body = {"messages": HI, "stream": True, "stream_interval": interval, **fields}
        joined = {"content": "", "reasoning": "", "reasoning_content": ""}
        for event in events(httpx.post(url, json=body))[:-1]:  # the last one is [DONE]
            for choice in event["choices"]:
                for name in joined:
                    joined[name] += choice["delta"].get(name) or ""
        assert joined == {name: message.get(name) or "" for name in joined}
    return message


def test_reasoning_and_answer_come_apart(thinking: Server) -> None:
    message = ask(thinking, f"<think>{THOUGHT}</think>\n\nHello world.")
    assert message["reasoning"] == message["reasoning_content"]
    assert message["reasoning"].strip() == THOUGHT.strip()
    assert message["content"] == "Hello world."


def test_an_answer_without_reasoning_is_as_it_was(thinking: Server) -> None:
    for text in ("Hello world.", "A <think> in prose, and </think> too.", " <thin", "a < b"):
        message = ask(thinking, text)
        assert message["content"].strip() == text.strip()
        assert "reasoning" not in message


def test_a_cut_within_the_reasoning_is_reasoning(thinking: Server) -> None:
    message = ask(thinking, f"<think>{THOUGHT}</think>Hello", max_tokens=12)
    assert message["content"] == ""
    assert message["reasoning"]


def test_reasoning_can_be_left_out(thinking: Server) -> None:
    script = f"<think>{THOUGHT}</think>Hello"
    message = ask(thinking, script, include_reasoning=False)
    assert message["content"] == "Hello"
    assert "reasoning" not in message


def test_each_choice_is_read_by_itself(thinking: Server) -> None:
    thinking.script = f"<think>{THOUGHT}</think>Hello"
    body = {"messages": HI, "n": 3}
    answer = httpx.post(f"{thinking.url}/v1/chat/completions", json=body).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello"] * 3


def test_the_client_has_the_field(thinking: Server) -> None:
    thinking.script = f"<think>{THOUGHT}</think>Hello"
    url = f"{thinking.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.reasoning_content.strip() == THOUGHT.strip()  # type: ignore[attr-defined]


def test_a_prompt_that_opens_the_reasoning_is_noticed() -> None:
    config = ServerConfig(reasoning_parser="qwen3")
    with running_server(config, chat_template=OPENED) as server:
        message = ask(server, f"{THOUGHT}</think>\nHello")
    assert message["reasoning"].strip() == THOUGHT.strip()
    assert message["content"] == "Hello"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_other_routes_lose_nothing(thinking: Server, path: str) -> None:
    thinking.script = "<think>Hm</think>Hello"
    asked: dict[str, Any] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 40},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": HI, "max_tokens": 40},
    }[path]
    answer = httpx.post(f"{thinking.url}{path}", json=asked)
    assert "<think>Hm</think>Hello" in answer.text


def test_an_answer_in_a_form_is_not_searched_for_reasoning(thinking: Server) -> None:
    message = ask(thinking, "<think>Hm</think>Hello", guided_regex=".*")
    assert message["content"] == "<think>Hm</think>Hello"
