"""OpenAI's chat messages → the plain messages that templates understand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve.errors import InvalidRequest
from serve.text.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

Message = dict[str, Any]


def for_template(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> list[Message]:
    """Fresh messages: content is a string (or parts, where the template loops over them), a
    `developer` is a `system` where the template knows no developer, and arguments of tool calls
    are objects. Raises InvalidRequest naming the message."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    return [_message(m, template, f"messages.{i}") for i, m in enumerate(messages)]


def _message(message: Mapping[str, Any], template: ChatTemplate, path: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(ROLES)}, not {str(role)[:100]!r}.",
            param=f"{path}.role",
        )
    result: Message = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not template.knows_developer:
        result["role"] = "system"
    text = _text(message.get("content"), f"{path}.content")
    result["content"] = [{"type": "text", "text": text}] if template.wants_content_parts else text
    if calls := result.get("tool_calls"):
        result["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    return result


def _text(content: object, path: str) -> str:
    """Content as one string; parts are pieces of one text, so nothing goes between them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{path} must be a string or a list of parts.", param=path)
    return "".join(_part_text(part, f"{path}.{i}") for i, part in enumerate(content))


def _part_text(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{path}: this model takes text parts only ({{'type': 'text', 'text': …}}); "
            f"{str(kind)[:100]!r} input is not supported.",
            param=path,
        )
    assert isinstance(part, Mapping)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text must be a string.", param=f"{path}.text")
    return text


def _tool_call(call: object, path: str) -> object:
    """Templates print arguments as JSON, so they need the object and not OpenAI's string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function must be an object.", param=f"{path}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        path = f"{path}.function.arguments"
        raise InvalidRequest(f"{path} must be JSON: {error}.", param=path) from error
    return {**call, "function": {**function, "arguments": parsed}}
