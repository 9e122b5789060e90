"""The answer of `/v1/messages`, in one piece or as Anthropic's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.responses import Response

from serve.api.answering.choices import Choice
from serve.api.answering.chunks import Envelope, text_json
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.parts import Text, text_of, whole_parts
from serve.api.answering.scores import Scores
from serve.api.answering.streaming import named_event
from serve.api.anthropic.cache_control import Written
from serve.api.anthropic.errors import error_event
from serve.api.anthropic.request import FIELD_NAMES
from serve.api.protocol.anthropic import AnthropicMessage, AnthropicUsage, StopReason, TextBlock
from serve.api.protocol.common import Usage
from serve.messages import FinishReason


@dataclass(frozen=True, slots=True)
class MessageAnswer:
    """A request, ready to run and to be answered. `written`: what `cache_control` had put into the
    cache."""

    job: Job
    streams: bool
    envelope: Envelope
    written: Written
    request_id: str

    def field_names(self) -> Mapping[str, str]:
        """What the job's fields are called in the request."""
        return FIELD_NAMES

    def scores(self) -> list[Scores]:
        """None: this API has no log-probabilities."""
        return []

    def error_event(self, error: Exception) -> bytes:
        """The end of a stream in which something went wrong."""
        return error_event(error, self.request_id)

    async def whole(self, choices: Sequence[Choice], tally: Tally) -> Response:
        """The answer without streaming."""
        (choice,) = choices
        assert choice.finish_reason is not None
        reason, sequence = _stop(choice.finish_reason, choice.stop_reason)
        blocks = [TextBlock(text=text) for text in whole_parts(choice.parts)]
        return json_response(self._message(blocks, tally.usage(), reason, sequence))

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as Anthropic's events: one message with one block of text.

        The first of them tells what came from the cache, so it waits until that is known.
        """
        begun = False
        async for _, parts, output in outputs:
            if not begun:
                begun = True
                message = self._message([], outputs.tally.usage(), None, None)
                yield named_event("message_start", message=message.model_dump())
                block = TextBlock(text="").model_dump()
                yield named_event("content_block_start", index=0, content_block=block)
            if text := text_of(parts):
                yield _delta(text)
            if output.finish_reason is not None:
                reason, sequence = _stop(output.finish_reason, output.stop_reason)
                yield named_event("content_block_stop", index=0)
                yield named_event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": sequence},
                    usage=self._usage(outputs.tally.usage()).model_dump(),
                )
        yield named_event("message_stop")

    def _message(
        self,
        content: list[TextBlock],
        usage: Usage,
        reason: StopReason | None,
        sequence: str | None,
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.envelope.id,
            model=self.envelope.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(usage),
        )

    def _usage(self, usage: Usage) -> AnthropicUsage:
        read = usage.prompt_tokens_details.cached_tokens
        written = self.written.beside(read)
        return AnthropicUsage(
            input_tokens=usage.prompt_tokens - read - written,
            output_tokens=usage.completion_tokens,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
        )


def _delta(text: Text) -> bytes:
    return (
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        f'"delta":{{"type":"text_delta","text":{text_json(text)}}}}}\n\n'
    ).encode("ascii")


def _stop(reason: FinishReason, stop_reason: str | int | None) -> tuple[StopReason, str | None]:
    if reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None


def json_response(answer: BaseModel) -> Response:
    """Every field is there, also those with defaults."""
    return Response(answer.model_dump_json(), media_type="application/json")
