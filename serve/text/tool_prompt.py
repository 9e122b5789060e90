"""Tools told in words, for models whose chat template has no place for them: the system message
lists them and says how a call is written; earlier calls and results become texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_HOW = """You can call functions. Their signatures:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def told_in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, whose contents are strings or lists of one text part, with tools in words."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = _HOW.format(tools=listed)
    first = messages[0] if messages[0]["role"] == "system" else None
    system = {"role": "system", "content": _with(first["content"] if first else "", how)}
    others = messages[1:] if first else messages
    return [system, *map(_in_words, others)]


def _in_words(message: Message) -> Message:
    if message["role"] == "tool":
        answered = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
        return {"role": "user", "content": answered}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(_call(call) for call in calls)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": _with(message["content"], written)}


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    said = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _with(content: Any, more: str) -> str:
    text = _text(content)
    return f"{text}\n\n{more}" if text else more
