"""Tools in words, for chat templates that have no place for them."""

from __future__ import annotations

from typing import Any

from serve.text.chat_template import ChatTemplate
from serve.text.tool_prompt import told_in_words

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}


def test_the_system_message_lists_the_tools_and_the_rest_becomes_text() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]},
    ]
    system, user, assistant, result = told_in_words(messages, TOOLS)
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name": "add"' in system["content"]
    assert user == messages[1]
    assert assistant["content"].count('<tool_call>\n{"name": "add", "arguments": {"a": "é"}}') == 2
    assert "tool_calls" not in assistant
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    assert messages[2]["tool_calls"] == [CALL, CALL], "the caller's are as they were"


def test_without_a_system_message_there_is_one() -> None:
    system, user = told_in_words([{"role": "user", "content": "Add."}], TOOLS)
    assert (system["role"], user["content"]) == ("system", "Add.")


def test_a_template_with_a_place_for_tools_is_known_by_its_variable() -> None:
    assert ChatTemplate("{% for t in tools %}{{ t }}{% endfor %}").knows_tools
    assert not ChatTemplate("{{ messages[0].content }} tools").knows_tools
