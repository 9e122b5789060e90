"""A Responses request in the chat API's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.api.answering.unsupported import refuse_unsupported_fields
from serve.api.errors import MissingField, Unsupported
from serve.api.protocol.chat import ChatCompletionRequest, Message
from serve.api.protocol.responses import ResponsesRequest
from serve.errors import InvalidRequest

_UNSUPPORTED = ("conversation", "prompt")


def refuse_unsupported(body: ResponsesRequest) -> None:
    """Raises InvalidRequest for what no answer could honour."""
    refuse_unsupported_fields(body.model_extra)
    for name in _UNSUPPORTED:
        if getattr(body, name, None):
            raise Unsupported(f"{name} is not supported.", param=name)
    if body.background and body.stream:
        raise Unsupported(
            "A background response is not streamed: ask for it by its id.", param="background"
        )
    if body.background and body.store is False:
        raise InvalidRequest("background needs store: the answer is kept.", param="background")
    _check_text_format((body.text or {}).get("format"))


def chat_request(body: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """The same wishes for a conversation; instructions come first and belong to this turn alone.

    A stream ends with the whole answer, so as to size it is asked for in one piece.
    """
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    return ChatCompletionRequest(
        messages=[*instructions, *messages],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools,
        tool_choice=body.tool_choice,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        response_format=_response_format((body.text or {}).get("format")),
    )


def _response_format(wanted: Any) -> Any:
    """A format, checked, as chat has it."""
    if wanted is None or wanted["type"] != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": wanted}


def field_names(asked: ChatCompletionRequest, paths: Sequence[str]) -> dict[str, str]:
    """What the fields of a chat request are called here; `paths` says where each message stands."""
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "response_format.json_schema": "text.format",
    }
    for i, (path, message) in enumerate(zip(paths, asked.messages, strict=True)):
        names[f"messages.{i}"] = path
        if message.role == "tool":
            names[f"messages.{i}.content"] = f"{path}.output"
        names[f"messages.{i}.tool_calls.0.function"] = path  # an item holds one call, as it is
    return names


def _check_text_format(wanted: Any) -> None:
    """The format stands in `text.format` itself: no `json_schema` around name and schema."""
    path = "text.format"
    if wanted is None or wanted == {"type": "text"}:
        return
    if not isinstance(wanted, dict) or "type" not in wanted:
        raise InvalidRequest(
            f"{path} must be an object with a type, such as {{'type': 'text'}}.", param=path
        )
    if wanted["type"] not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            f"{path}.type must be 'text', 'json_object' or 'json_schema'.", param=f"{path}.type"
        )
    if wanted["type"] == "json_schema":
        for name, kind in (("name", str), ("schema", dict)):
            if not isinstance(wanted.get(name), kind):
                what = "a string" if kind is str else "an object"
                raise MissingField(
                    f"{path}.{name} must be {what}; it stands beside {path}.type.",
                    param=f"{path}.{name}",
                )
