"""`POST /v1/chat/completions` through the official client."""

from __future__ import annotations

from typing import Any

import httpx
import openai

from tests.api.conftest import ANSWER, MODEL, Server

HI: list[Any] = [{"role": "user", "content": "Hello"}]


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": HI, **fields})


def test_an_answer_has_openais_shape(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI)

    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(server.ids(ANSWER)) + 1  # the end token counts
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_stream_tells_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HI, stream=True))

    assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
