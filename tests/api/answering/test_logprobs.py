"""Log-probabilities in both endpoints' forms."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.conftest import Server
from tests.api.sse import events

HI = [{"role": "user", "content": "Hello"}]


def complete(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "one two three four", **fields})


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": HI, **fields})


def test_log_01_log_probabilities_are_finite_json_numbers(http: httpx.Client) -> None:
    response = complete(http, echo=True, logprobs=2, temperature=1, top_k=1, max_tokens=2)

    assert response.status_code == 200

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    parsed = json.loads(response.text, parse_constant=refuse)
    logprobs = parsed["choices"][0]["logprobs"]
    assert -9999.0 in logprobs["top_logprobs"][1].values()  # the fake's impossible candidate


def test_log_04_echo_gives_every_list_an_entry_per_token(
    http: httpx.Client, server: Server
) -> None:
    answer = complete(http, echo=True, logprobs=2, max_tokens=3).json()

    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    num_tokens = answer["usage"]["prompt_tokens"] + 3
    assert {key: len(value) for key, value in logprobs.items()} == {
        "tokens": num_tokens,
        "token_logprobs": num_tokens,
        "top_logprobs": num_tokens,
        "text_offset": num_tokens,
    }
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_the_chosen_token_is_among_the_candidates(http: httpx.Client) -> None:
    logprobs = complete(http, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{" Hello": -0.5}, {" world": -0.5}]


def test_log_06_bytes_of_split_characters_join_to_the_text(
    http: httpx.Client, server: Server
) -> None:
    server.script = "é世👋"

    (choice,) = chat(http, logprobs=True, top_logprobs=3).json()["choices"]

    entries = choice["logprobs"]["content"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"] or [])
    assert joined.decode() == choice["message"]["content"] == "é世👋"
    assert all(entry["token"] for entry in entries)
    assert entries[0]["token"] == r"bytes:\xc3"
    assert entries[-1] == {
        **entries[-1],
        "token": "<|im_end|>",
        "bytes": None,  # the text leaves it out
    }
    for entry in entries:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.5, -9999.0]
        names = [top["token"] for top in entry["top_logprobs"]]
        assert len(set(names)) == 3


@pytest.mark.parametrize("includes", [False, True])
def test_a_token_that_a_client_made_an_end_has_bytes_only_if_it_is_shown(
    http: httpx.Client, server: Server, includes: bool
) -> None:
    server.script = server.ids(" Hello world")
    fields: dict[str, Any] = {
        "logprobs": True,
        "stop_token_ids": server.ids(" world"),
        "include_stop_str_in_output": includes,
    }

    (choice,) = chat(http, **fields).json()["choices"]
    chunks = events(chat(http, stream=True, **fields))[:-1]

    entries = choice["logprobs"]["content"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"] or [])
    assert joined.decode() == choice["message"]["content"] == " Hello" + " world" * includes
    assert len(entries) == 2
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [x for part in parts if part for x in part["content"]] == entries


def test_log_09_41_streamed_log_probabilities_merge_to_the_same(http: httpx.Client) -> None:
    prompts = ["Hello wörld 日本", "one two"]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 4, "n": 2}
    fields["prompt"] = prompts
    choices = complete(http, **fields).json()["choices"]

    chunks = events(complete(http, stream=True, **fields))[:-1]

    for whole in choices:
        parts = [
            chunk["choices"][0]
            for chunk in chunks
            if chunk["choices"][0]["index"] == whole["index"]
        ]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert whole["text"].startswith(prompts[whole["index"] // 2])
        for key, expected in whole["logprobs"].items():
            merged = [x for part in parts if part["logprobs"] for x in part["logprobs"][key]]
            assert merged == expected, key
        for token, offset in zip(
            whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True
        ):
            if not token.startswith("bytes:"):
                assert whole["text"][offset:].startswith(token)


def test_streamed_chat_log_probabilities_merge_to_the_same(
    http: httpx.Client, server: Server
) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    (whole,) = chat(http, **fields).json()["choices"]

    chunks = events(chat(http, stream=True, **fields))[:-1]

    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [x for part in parts if part for x in part["content"]] == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 100_000}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 10**9}, "prompt_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_log_10_absurd_counts_are_refused_with_the_cap(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = http.post(path, json={"messages": HI, **fields}).json()["error"]

    assert error["param"] == param
    assert "20" in error["message"] or "logprobs: true" in error["message"]


def test_no_alternatives_are_sent_unless_asked_for(http: httpx.Client) -> None:
    (choice,) = chat(http, logprobs=True, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    for off in ({}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}):
        assert chat(http, **off).json()["choices"][0]["logprobs"] is None


def test_prompt_log_probabilities_name_each_candidate(http: httpx.Client, server: Server) -> None:
    ids = server.ids("one two three four")
    for answer in (
        complete(http, prompt_logprobs=1).json()["choices"][0],
        http.post("/v1/completions", json={"prompt": ids, "prompt_logprobs": 1}).json()["choices"][
            0
        ],
    ):
        first, *rest = answer["prompt_logprobs"]
        assert first is None
        assert [list(position) for position in rest] == [[str(token_id)] for token_id in ids[1:]]
        assert rest[0][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": " two"}
    assert len(chat(http, prompt_logprobs=2).json()["prompt_logprobs"]) > 1


def test_tokens_can_be_shown_as_ids(http: httpx.Client, server: Server) -> None:
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    hello = f"token_id:{server.ids(' Hello')[0]}"

    completion = complete(http, logprobs=0, **fields).json()["choices"][0]
    answer = chat(http, logprobs=True, **fields).json()["choices"][0]

    assert completion["logprobs"]["tokens"] == [hello]
    assert answer["logprobs"]["content"][0]["token"] == hello
