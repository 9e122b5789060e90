"""Reading answers: times of tokens, counts, and what is no answer at all."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.bench.answers import BadAnswer, events, read_answer
from serve.bench.client import RawAnswer, Target, encode_request
from serve.errors import ConfigError


def stream(*parts: object) -> RawAnswer:
    pieces = [
        (float(when), f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode())
        for when, part in enumerate(parts)
    ]
    return RawAnswer(200, "text/event-stream; charset=utf-8", pieces)


def text(words: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": words, "finish_reason": finish, **more}]}


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r")), max_size=8),
    st.data(),
)
def test_events_come_out_whole_however_the_bytes_are_cut(texts: list[str], data) -> None:
    stripped = [one.encode().strip() for one in texts]
    whole = b"".join(b": comment\ndata: " + one + b"\r\n\r\n" for one in stripped)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    edges = [0, *cuts, len(whole)]
    pieces = [(float(i), whole[a:b]) for i, (a, b) in enumerate(pairwise(edges))]
    found = list(events(pieces))
    assert [event for _, event in found] == stripped
    assert [when for when, _ in found] == sorted(when for when, _ in found)


def test_the_server_s_own_count_wins() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 3}}
    answer = read_answer(stream(text("a"), text("b"), text("", "length"), usage, "[DONE]"))
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.counted_by) == (7, 3, "usage")
    assert answer.token_times == [0.0, 1.0]  # the third event only says why it ended


def test_without_usage_the_ids_count() -> None:
    answer = read_answer(stream(text("a", token_ids=[1, 2]), text("b", "stop", token_ids=[3])))
    assert (answer.num_tokens, answer.counted_by) == (3, "ids")


def test_a_chat_begins_with_its_first_content() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "Hi"}, {"reasoning_content": "x"}]
    parts = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    answer = read_answer(stream(*parts, {"choices": [{"delta": {}, "finish_reason": "stop"}]}))
    assert answer.token_times == [1.0, 2.0]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (stream(text("a")), "ended early"),
        (stream("[DONE]"), "no tokens"),
        (stream("{"), "not JSON"),
        (stream({"error": {"message": "engine died"}}), "engine died"),
        (RawAnswer(500, "text/plain", [(0.0, b"oops")]), "HTTP 500: oops"),
        (RawAnswer(200, "application/json", [(0.0, b"{}")]), "no choices"),
    ],
)
def test_what_is_no_answer_is_said(raw: RawAnswer, says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        read_answer(raw)


def test_a_request_carries_its_path_key_and_length() -> None:
    target = Target.parse("http://localhost:81/base/v1/", "secret")
    assert target == Target("localhost", 81, False, "/base", "secret")
    request = encode_request(target, "/v1/completions", {"a": 1})
    head, body = request.split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret" in head
    assert b"Content-Length: 7" in head
    assert body == b'{"a":1}'


def test_only_http_urls_are_targets() -> None:
    assert Target.parse("https://example.com") == Target("example.com", 443, True, "")
    with pytest.raises(ConfigError, match="--base-url"):
        Target.parse("localhost:8000")
