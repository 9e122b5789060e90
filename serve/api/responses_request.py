"""A Responses request in the chat API's words."""

from __future__ import annotations

from collections.abc import Sequence

from serve.api.errors import Unsupported
from serve.api.protocol.chat import ChatCompletionRequest, FunctionCall, Message, ToolCall
from serve.api.protocol.responses import InputItem, ResponsesRequest
from serve.api.unsupported import refuse_unsupported_fields
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


def turns(body: ResponsesRequest) -> list[Message]:
    """`input` as messages. Raises InvalidRequest."""
    if isinstance(body.input, str):
        return [Message(role="user", content=body.input)]
    return [_turn(item, f"input.{i}") for i, item in enumerate(body.input)]


def _turn(item: InputItem, path: str) -> Message:
    match item.type or "message":
        case "message" if item.role is not None:
            return Message(role=item.role, content=item.content)
        case "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=function)
            return Message(role="assistant", tool_calls=[call])
        case "function_call_output":
            return Message(role="tool", tool_call_id=item.call_id, content=item.output)
        case "message":
            raise InvalidRequest(f"{path}.role is required.", param=f"{path}.role")
    raise Unsupported(f"Items of this type are not supported: {path}.", param=f"{path}.type")


def chat_request(body: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """The same wishes for a conversation; instructions come first and belong to this turn alone."""
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    return ChatCompletionRequest(
        messages=[*instructions, *messages],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools,
        tool_choice=body.tool_choice,
        response_format=(body.text or {}).get("format"),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stream=body.stream,
    )
