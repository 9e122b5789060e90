"""A Messages request in OpenAI's words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serve.api.answering.unsupported import refuse_unsupported_fields
from serve.api.errors import MissingField, Unsupported
from serve.api.protocol.anthropic import (
    CountTokensRequest,
    InputBlock,
    InputMessage,
    MessagesRequest,
)
from serve.api.protocol.chat import (
    ChatCompletionRequest,
    ContentPart,
    FunctionCall,
    Message,
    ToolCall,
)
from serve.errors import InvalidRequest

FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
"""Fields of the chat path that have another name here."""

# Fields that ask for something this server does not do; ignored, they would change the answer.
_UNSUPPORTED = {
    "mcp_servers": "this server calls no other servers",
    "container": "this server runs no code",
}


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """What to generate. Raises InvalidRequest."""
    refuse_unsupported_fields(body.model_extra)
    return ChatCompletionRequest(
        messages=chat_messages(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        response_format=_response_format(body),
        **_template_fields(body),
    )


def _response_format(body: MessagesRequest) -> Any:
    """What is asked of the answer's form, as chat has it. Raises InvalidRequest."""
    for path in ("output_config.format", "output_format"):
        wanted = _extra(body, path)
        if wanted is None:
            continue
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise InvalidRequest(f"{path}.type must be 'json_schema'.", param=f"{path}.type")
        if not isinstance(wanted.get("schema"), dict):
            raise MissingField(f"{path}.schema must be an object.", param=f"{path}.schema")
        form = {"name": "answer", "schema": wanted["schema"], "strict": True}
        return {"type": "json_schema", "json_schema": form}
    return None


def counted_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """The conversation alone. Raises InvalidRequest."""
    return ChatCompletionRequest(messages=chat_messages(body), **_template_fields(body))


def _template_fields(body: CountTokensRequest) -> dict[str, Any]:
    for path, reason in _UNSUPPORTED.items():
        if _extra(body, path) not in (None, False, "", [], {}):
            raise Unsupported(f"{path}: {reason}.", param=path)
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        raise Unsupported("Tool use is not supported; leave tools out.", param="tools")
    if (body.thinking or {}).get("type") == "enabled":
        raise Unsupported("A budget for thinking is not supported.", param="thinking")
    # A conversation that ends with the assistant's words is to be continued from there.
    return {"continue_final_message": body.messages[-1].role == "assistant"}


def _extra(body: CountTokensRequest, path: str) -> Any:
    """The value at a path of fields that we do not know by themselves."""
    value: Any = body.model_extra or {}
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def chat_messages(body: CountTokensRequest) -> list[Message]:
    result = []
    if body.system:
        result.append(Message(role="system", content=_text_parts(body.system, "system")))
    for i, message in enumerate(body.messages):
        result += _turn(message, f"messages.{i}.content")
    return result


def _turn(message: InputMessage, path: str) -> list[Message]:
    """One message; tools' results, which Anthropic puts into the user's, become turns of theirs."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_result_text(block, path))
        for block in message.content
        if block.type == "tool_result"
    ]
    calls = [
        ToolCall(
            id=block.id,
            type="function",
            function=FunctionCall(name=block.name or "", arguments=json.dumps(block.input or {})),
        )
        for block in message.content
        if block.type == "tool_use"
    ]
    texts = [b for b in message.content if b.type not in ("tool_result", "tool_use", "thinking")]
    if not texts and not calls:
        return results
    parts = _text_parts(texts, path)
    return [*results, Message(role=message.role, content=parts, tool_calls=calls or None)]


def _text_parts(content: str | Sequence[InputBlock], path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise Unsupported(
                f"This model reads text only; {block.type[:40]} blocks are not supported.",
                param=path,
            )
        if block.text is None:
            raise MissingField("A text block needs its text.", param=path)
    return [ContentPart(type="text", text=block.text) for block in content]


def _result_text(block: InputBlock, path: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = [part.get("text") for part in block.content if part.get("type") == "text"]
    if len(texts) < len(block.content) or not all(isinstance(text, str) for text in texts):
        raise Unsupported("A tool's result must be text.", param=path)
    return "".join(str(text) for text in texts)
