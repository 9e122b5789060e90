"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve.messages import AddRequest
from tests.api.conftest import Server

HI = [{"role": "user", "content": "Hello"}]


def test_text_becomes_ids_and_ids_become_text(http: httpx.Client, server: Server) -> None:
    for text in ("Hello world", "", "Grüße 👋\n"):
        answer = http.post("/tokenize", json={"prompt": text}).json()
        assert answer["tokens"] == server.ids(text)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 512
        back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": text}


def test_a_conversation_has_the_ids_that_chat_uses(http: httpx.Client, server: Server) -> None:
    http.post("/v1/chat/completions", json={"messages": HI})
    used = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))

    answer = http.post("/tokenize", json={"messages": HI, "model": "alias"}).json()

    assert answer["tokens"] == used.prompt_token_ids
    bare = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    assert bare["count"] < answer["count"]


def test_tokens_are_spelled_on_request(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hello é", "return_token_strs": True}).json()

    assert answer["token_strs"] == ["Hello", " ", r"bytes:\xc3", r"bytes:\xa9"]
    assert "token_strs" not in http.post("/tokenize", json={"prompt": "a"}).json()


def test_special_tokens_are_shown_unless_skipped(http: httpx.Client, server: Server) -> None:
    ids = server.ids("<|im_start|>Hello")

    shown = http.post("/detokenize", json={"tokens": ids}).json()
    skipped = http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()

    assert shown["prompt"] == "<|im_start|>Hello"
    assert skipped["prompt"] == "Hello"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**30]}, "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_requests_name_the_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
