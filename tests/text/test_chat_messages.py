"""OpenAI's messages as templates get them."""

from __future__ import annotations

from typing import Any

import pytest

from serve.errors import InvalidRequest
from serve.text.chat_messages import for_template
from serve.text.chat_template import ChatTemplate

PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
BY_PARTS = ChatTemplate("{% for part in m.content %}{{ part.text }}{% endfor %}")
WITH_DEVELOPER = ChatTemplate("{{ 'developer' }}")
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def one(message: dict[str, Any], template: ChatTemplate = PLAIN) -> dict[str, Any]:
    (result,) = for_template([message], template)
    return result


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_tpl_06_parts_are_the_joined_text(role: str) -> None:
    assert one({"role": role, "content": PARTS}) == one({"role": role, "content": "ab"})


def test_tpl_06_a_template_that_loops_over_parts_gets_parts() -> None:
    expected = [{"type": "text", "text": "ab"}]
    assert one({"role": "user", "content": PARTS}, BY_PARTS)["content"] == expected
    assert one({"role": "user", "content": "ab"}, BY_PARTS)["content"] == expected


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"type": "text", "text": None}], "messages.0.content.0.text"),
        ([*PARTS, {"text": "no type"}], "messages.0.content.2"),
        ([PARTS], "messages.0.content.0"),
        ([7], "messages.0.content.0"),
        (7, "messages.0.content"),
        ({"type": "text", "text": "a"}, "messages.0.content"),
    ],
)
def test_tpl_06_a_malformed_part_is_named(content: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        one({"role": "user", "content": content})
    assert error.value.param == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "hologram"])
def test_ops_21_a_part_that_is_not_text_is_refused_by_its_kind(kind: str) -> None:
    url = {"url": "http://127.0.0.1:1/x.png"}
    with pytest.raises(InvalidRequest, match=f"'{kind}' input is not supported"):
        one({"role": "user", "content": [*PARTS, {"type": kind, kind: url}]})


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}


def test_val_08_no_content_beside_tool_calls_is_the_same_however_it_is_said() -> None:
    spellings: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
    results = [one({"role": "assistant", "tool_calls": [CALL], **s}) for s in spellings]
    assert all(result == results[0] for result in results)
    assert results[0]["content"] == ""


def test_arguments_of_tool_calls_become_objects() -> None:
    (call,) = one({"role": "assistant", "tool_calls": [CALL]})["tool_calls"]
    assert call == {**CALL, "function": {"name": "f", "arguments": {"x": [1]}}}
    empty = {**CALL, "function": {"name": "f", "arguments": ""}}
    (call,) = one({"role": "assistant", "tool_calls": [empty]})["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "call", [{**CALL, "function": {"name": "f", "arguments": "{"}}, {"id": "1"}, "f()"]
)
def test_a_broken_tool_call_is_named(call: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        one({"role": "assistant", "tool_calls": [call]})
    assert str(error.value.param).startswith("messages.0.tool_calls.0.function")


def test_tpl_05_a_developer_is_a_system_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "be brief"}
    assert one(message)["role"] == "system"
    assert one(message, WITH_DEVELOPER)["role"] == "developer"
    assert message["role"] == "developer"  # the caller's message stays as it was


@pytest.mark.parametrize("message", [{"role": "wizard", "content": "x"}, {"content": "x"}])
def test_tpl_05_an_unknown_role_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="role must be one of") as error:
        one(message)
    assert error.value.param == "messages.0.role"


def test_val_05_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        for_template([], PLAIN)
