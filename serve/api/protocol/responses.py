"""`POST /v1/responses`: OpenAI's Responses API, text in and out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.api.protocol.bounds import (
    MAX_INCLUDED,
    MAX_MESSAGES,
    CallId,
    JsonObject,
    Listed,
    Metadata,
    ModelName,
    Name,
    Tools,
)
from serve.api.protocol.chat import ContentParts
from serve.api.protocol.common import Finite, RequestModel, ResponseModel, Whole


class InputItem(RequestModel):
    """A message (the default type), an earlier call of a function, a function's output, what was
    thought, or a reference to an item of an earlier response."""

    type: Name | None = None
    id: Name | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | ContentParts | None = None
    call_id: CallId | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | ContentParts | None = None


class Reasoning(RequestModel):
    """How much to think, for templates that know it."""

    effort: Name | None = None


class ResponsesRequest(RequestModel):
    """What to answer, and how."""

    model: ModelName | None = None
    input: str | Annotated[Listed[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Whole | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_logprobs: Whole | None = None
    include: Annotated[Listed[Name], Field(max_length=MAX_INCLUDED)] | None = None
    tools: Tools | None = None
    tool_choice: Name | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    max_tool_calls: Whole | None = None
    service_tier: Name | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    user: Name | None = None


class OutputText(ResponseModel):
    """Text that the model wrote."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[dict[str, Any]] = Field(default_factory=list)


ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputMessage(ResponseModel):
    """The answer's one item."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class CachedTokens(ResponseModel):
    """Details of the input."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(ResponseModel):
    """Details of the output; thinking is not told apart from text."""

    reasoning_tokens: int = 0


class ResponsesUsage(ResponseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponsesAnswer(ResponseModel):
    """OpenAI's `response` object: the answer, and what was asked as far as it is known here."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None = None
    user: str | None


ItemOrder = Literal["asc", "desc"]


class InputItems(ResponseModel):
    """A page of what a response was given, as items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ResponseModel):
    """How many tokens a request's input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(ResponseModel):
    """A stored answer is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
