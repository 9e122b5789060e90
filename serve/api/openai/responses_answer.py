"""The answer of `/v1/responses` in one piece, with what was asked echoed in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

from serve.api.answering.choices import Choice
from serve.api.answering.parts import whole_parts
from serve.api.errors import error_info
from serve.api.openai.chat_answer import ChatAnswer
from serve.api.openai.response_store import StoredItem
from serve.api.protocol.common import Usage
from serve.api.protocol.responses import (
    CachedTokens,
    ItemStatus,
    OutputMessage,
    OutputText,
    ReasoningTokens,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from serve.messages import FinishReason


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """A request, ready to run and to be answered."""

    body: ResponsesRequest
    chat: ChatAnswer
    given: tuple[StoredItem, ...]  # the conversation so far, if the answer is to be kept
    item_id: str

    @property
    def response_id(self) -> str:
        """The answer's id."""
        return self.chat.envelope.id

    @property
    def stores(self) -> bool:
        """Whether the answer is to be kept."""
        return self.body.store is not False

    def whole(self, choice: Choice, usage: Usage) -> ResponsesAnswer:
        """The answer, now that it is over. With log-probabilities that takes a while: not for the
        event loop."""
        cut = choice.finish_reason is FinishReason.LENGTH
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        logprobs: list[dict[str, Any]] = []
        if (writer := self.chat.logprobs_writer()) is not None:
            logprobs = writer.generated(choice.logprobs, hides_last=choice.hides_last)["content"]
        content = [OutputText(text=text, logprobs=logprobs) for text in whole_parts(choice.parts)]
        item = self.item(status, content)
        return self.answer(status, [item], usage)

    def item(self, status: ItemStatus, content: list[OutputText]) -> OutputMessage:
        """The answer's one item."""
        return OutputMessage(id=self.item_id, status=status, content=content)

    def failed(self, error: Exception) -> ResponsesAnswer:
        """The answer when something went wrong."""
        answer = self.answer("failed", [])
        answer.error = {"code": "server_error", "message": error_info(error).message}
        return answer

    def answer(
        self, status: Status, output: list[OutputMessage], usage: Usage | None = None
    ) -> ResponsesAnswer:
        """The answer as it stands."""
        body, envelope, sampling = self.body, self.chat.envelope, self.chat.job.sampling
        thinks = body.reasoning
        return ResponsesAnswer(
            id=envelope.id,
            created_at=envelope.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            background=bool(body.background),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=envelope.model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": None, "summary": None, **(thinks.model_dump() if thinks else {})},
            safety_identifier=body.safety_identifier,
            service_tier=body.service_tier or "default",
            store=self.stores,
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **_given(body.text)},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None if usage is None else _usage(usage),
            user=body.user,
        )


def _given(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(),
        total_tokens=usage.total_tokens,
    )
