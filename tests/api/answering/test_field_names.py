"""Errors name fields as the request that was sent does."""

from __future__ import annotations

import httpx
import pytest

from serve.api.answering.field_names import fields_named
from serve.errors import InvalidRequest, RequestError

NAMES = {
    "messages": "input",
    "messages.2": "input.1",
    "messages.2.content": "input.1.output",
    "max_tokens": "max_output_tokens",
}


@pytest.mark.parametrize(
    ("param", "message", "renamed", "sentence"),
    [
        ("max_tokens", "so max_tokens is 5", "max_output_tokens", "so max_output_tokens is 5"),
        (
            "messages.2.content.0",
            "messages.2.content.0: x",
            "input.1.output.0",
            "input.1.output.0: x",
        ),
        ("messages.2.role", "messages.2.role is", "input.1.role", "input.1.role is"),
        ("messages.20", "messages.20 is", "input.20", "input.20 is"),
        ("messages", "messages must", "input", "input must"),
        ("messages", "These messages must", "input", "These messages must"),  # a word as any
        ("top_p", "top_p is", "top_p", "top_p is"),
        (None, "nothing", None, "nothing"),
    ],
)
def test_the_longest_path_that_is_known_counts(
    param: str | None, message: str, renamed: str | None, sentence: str
) -> None:
    with pytest.raises(RequestError) as told, fields_named(lambda: NAMES):
        raise InvalidRequest(message, param=param)
    assert (told.value.param, str(told.value)) == (renamed, sentence)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/chat/completions/render"])
def test_a_chats_newer_limit_is_called_by_its_name(http: httpx.Client, route: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for fields, param in (
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 9999}]}, "messages"),
    ):
        error = http.post(route, json={"messages": messages, **fields}).json()["error"]
        assert error["param"] == param
        assert f"{param} is 1000000" in error["message"] or param == "messages"
