"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.api.protocol.bounds import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOL_CALLS,
    CallId,
    JsonObject,
    Listed,
    Name,
    Tools,
)
from serve.api.protocol.common import (
    FinishedBy,
    GenerationRequest,
    PromptLogprobs,
    RequestMetrics,
    RequestModel,
    ResponseModel,
    Usage,
    Whole,
)

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(RequestModel):
    """One part of a message; only text parts are understood."""

    type: Name
    text: str | None = None


ContentParts = Annotated[Listed[ContentPart], Field(max_length=MAX_PARTS)]


class FunctionCall(RequestModel):
    """The function an earlier answer called; `arguments` is JSON in a string, as it was sent."""

    name: Name
    arguments: str | JsonObject | None = None


class ToolCall(RequestModel):
    """A call in an assistant message of the history."""

    id: CallId | None = None
    type: Name | None = None
    function: FunctionCall


class Message(RequestModel):
    """One turn. Further keys reach the chat template as they are."""

    role: Role
    content: str | ContentParts | None = None
    name: Name | None = None
    tool_calls: Annotated[Listed[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: CallId | None = None


Messages = Annotated[Listed[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class TemplateFields(RequestModel):
    """How a conversation becomes a prompt; shared with `/tokenize`."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: Name | None = None
    documents: Annotated[Listed[JsonObject], Field(max_length=MAX_DOCUMENTS)] | None = None
    tools: Tools | None = None
    tool_choice: Name | JsonObject | None = None


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """A conversation to continue, and how."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    include_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None


class TopLogprob(ResponseModel):
    """A candidate token. `bytes` is null for a token that stands for no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token and the best candidates at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """One entry per generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(ResponseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ChatChoice(ResponseModel):
    """One of the `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """The answer without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = None
