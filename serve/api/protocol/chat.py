"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from serve.api.protocol.common import (
    FinishedBy,
    GenerationRequest,
    Listed,
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

    type: str
    text: str | None = None


class FunctionCall(RequestModel):
    """The function an earlier answer called; `arguments` is JSON in a string, as it was sent."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(RequestModel):
    """A call in an assistant message of the history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(RequestModel):
    """One turn. Further keys reach the chat template as they are."""

    role: Role
    content: str | Listed[ContentPart] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None


Messages = Annotated[Listed[Message], Field(min_length=1, max_length=8192)]


class TemplateFields(RequestModel):
    """How a conversation becomes a prompt; shared with `/tokenize`."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """A conversation to continue, and how."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    response_format: Any = None


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
    content: str
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
