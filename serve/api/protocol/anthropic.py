"""`POST /v1/messages`: Anthropic's conversation format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from serve.api.protocol.bounds import (
    MAX_MESSAGES,
    MAX_PARTS,
    CallId,
    JsonObject,
    Listed,
    Metadata,
    ModelName,
    Name,
    StopStrings,
    Tools,
)
from serve.api.protocol.common import Finite, RequestModel, ResponseModel, Whole


class CacheControl(RequestModel):
    """A mark: everything up to here is to stay in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class InputBlock(RequestModel):
    """A block of a message: text, a tool's use, or its result."""

    type: Name
    text: str | None = None
    id: CallId | None = None
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: CallId | None = None
    content: str | Annotated[Listed[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    cache_control: CacheControl | None = None


InputBlocks = Annotated[Listed[InputBlock], Field(max_length=MAX_PARTS)]


class InputMessage(RequestModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | InputBlocks


class CountTokensRequest(RequestModel):
    """A conversation."""

    model: ModelName | None = None
    messages: Annotated[Listed[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | InputBlocks | None = None
    tools: Tools | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to continue, and how."""

    max_tokens: Whole
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    metadata: Metadata | None = None


class TextBlock(ResponseModel):
    """What the model said."""

    type: Literal["text"] = "text"
    text: str


class AnthropicUsage(ResponseModel):
    """Token counts; what was read from the cache, and what `cache_control` newly wrote into it, is
    not among `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


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
    request_id: str
