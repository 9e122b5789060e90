"""The answer of `/v1/responses`, in one piece or as OpenAI's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from serve.api.chat_answer import ChatAnswer
from serve.api.choices import Choice
from serve.api.chunks import text_json
from serve.api.errors import error_info
from serve.api.generation import Outputs
from serve.api.protocol.chat import Message
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
from serve.api.streaming import named_event
from serve.messages import FinishReason

_DELTA = "response.output_text.delta"


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """A request, ready to run and to be answered."""

    body: ResponsesRequest
    chat: ChatAnswer
    messages: list[Message]  # the conversation so far, without instructions
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
        """The answer, now that it is over."""
        cut = choice.finish_reason is FinishReason.LENGTH
        status: Literal["incomplete", "completed"] = "incomplete" if cut else "completed"
        logprobs: list[dict[str, Any]] = []
        if (writer := self.chat.logprobs_writer()) is not None:
            logprobs = writer.generated(choice.logprobs, hides_last=choice.hides_last)["content"]
        item = self.item(status, [OutputText(text=choice.text, logprobs=logprobs)])
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
        return ResponsesAnswer(
            id=envelope.id,
            created_at=envelope.created,
            status=status,
            background=bool(body.background),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=envelope.model,
            output=output,
            previous_response_id=body.previous_response_id,
            store=self.stores,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            usage=None if usage is None else _usage(usage),
            user=body.user,
        )


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(),
        total_tokens=usage.total_tokens,
    )


class ResponseEvents:
    """The events of one streamed answer, numbered in OpenAI's order.

    `keep` is told the whole answer and its text before the last event.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        outputs: Outputs,
        keep: Callable[[ResponsesAnswer, str], None],
    ) -> None:
        self._writer = writer
        self._outputs = outputs
        self._keep = keep
        self._next_number = 0
        self._place = {"item_id": writer.item_id, "output_index": 0, "content_index": 0}

    async def events(self) -> AsyncIterator[bytes]:
        """From `response.created` to `response.completed` or `response.incomplete`."""
        writer = self._writer
        begun = writer.answer("in_progress", []).model_dump()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = writer.item("in_progress", []).model_dump()
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = OutputText(text="").model_dump()
        yield self._event("response.content_part.added", **self._place, part=part)
        choice = Choice()
        logprobs = writer.chat.logprobs_writer()
        async for _, output in self._outputs:
            choice.add(output)
            if logprobs is not None and output.logprobs:
                scored = logprobs.generated(output.logprobs, hides_last=output.hides_last)
                entries = scored["content"]
                yield self._event(_DELTA, **self._place, delta=output.text, logprobs=entries)
            elif output.text:
                yield self._delta(output.text)
        for event in self._ending(choice):
            yield event

    def failed(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return self._event("response.failed", response=self._writer.failed(error).model_dump())

    def _ending(self, choice: Choice) -> list[bytes]:
        whole = self._writer.whole(choice, self._outputs.tally.usage())
        self._keep(whole, choice.text)
        answer = whole.model_dump()
        (item,) = answer["output"]
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._event("response.output_text.done", **self._place, **text),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole.status}", response=answer),
        ]

    def _event(self, name: str, **fields: Any) -> bytes:
        return named_event(name, sequence_number=self._number(), **fields)

    def _delta(self, text: str) -> bytes:
        """`_event` for the one kind that comes once per token."""
        return (
            f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","sequence_number":{self._number()},'
            f'"item_id":"{self._writer.item_id}","output_index":0,"content_index":0,'
            f'"delta":{text_json(text)},"logprobs":[]}}\n\n'
        ).encode("ascii")

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number
