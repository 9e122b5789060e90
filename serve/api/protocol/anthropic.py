"""`POST /v1/messages`: Anthropic's conversation format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.api.protocol.common import Finite, Listed, RequestModel, ResponseModel, Whole


class CacheControl(RequestModel):
    """A mark: everything up to here is to stay in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class InputBlock(RequestModel):
    """A block of a message: text, a tool's use, or its result."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    cache_control: CacheControl | None = None


class InputMessage(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Listed[InputBlock]


class CountTokensRequest(RequestModel):
    """A conversation."""

    model: str | None = None
    messages: Annotated[Listed[InputMessage], Field(min_length=1, max_length=8192)]
    system: str | Listed[InputBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to continue, and how."""

    max_tokens: Whole
    stop_sequences: Annotated[Listed[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    metadata: dict[str, Any] | None = None


class TextBlock(ResponseModel):
    """What the model said."""

    type: Literal["text"] = "text"
    text: str


class AnthropicUsage(ResponseModel):
    """Token counts; cached prompt tokens are not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class AnthropicMessage(ResponseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(ResponseModel):
    """How many tokens the conversation has."""

    input_tokens: int


class AnthropicErrorInfo(ResponseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """Every answer with a status of 400 or more."""

    type: Literal["error"] = "error"
    error: AnthropicErrorInfo
