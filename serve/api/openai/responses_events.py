"""The answer of `/v1/responses` as OpenAI's events: while it is made, and again from the store."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from serve.api.answering.choices import Choice
from serve.api.answering.chunks import text_json
from serve.api.answering.generation import Outputs
from serve.api.answering.parts import text_of
from serve.api.answering.streaming import named_event
from serve.api.openai.response_store import StoredResponse
from serve.api.openai.responses_answer import ResponseWriter
from serve.api.protocol.common import Usage
from serve.api.protocol.responses import OutputText, ResponsesAnswer
from serve.errors import InvalidRequest

T = TypeVar("T")

_DELTA = "response.output_text.delta"
_CUTS = "I"  # characters, then entries of logprobs, of each piece


class _Events:
    """The events of one answer, numbered in OpenAI's order."""

    def __init__(self, item_id: str) -> None:
        self._item_id = item_id
        self._place = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._next_number = 0

    def head(self, begun: dict[str, Any]) -> list[bytes]:
        """What comes before the text."""
        item = {"id": self._item_id, "type": "message", "status": "in_progress"}
        part = OutputText(text="").model_dump()
        return [
            *self.created(begun),
            self.event(
                "response.output_item.added",
                output_index=0,
                item={**item, "role": "assistant", "content": []},
            ),
            self.event("response.content_part.added", **self._place, part=part),
        ]

    def created(self, begun: dict[str, Any]) -> list[bytes]:
        """What comes first, whatever follows."""
        return [
            self.event("response.created", response=begun),
            self.event("response.in_progress", response=begun),
        ]

    def delta(self, text: str) -> bytes:
        """`scored_delta` for the one kind that comes once per token."""
        return (
            f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","sequence_number":{self._number()},'
            f'"item_id":"{self._item_id}","output_index":0,"content_index":0,'
            f'"delta":{text_json(text)},"logprobs":[]}}\n\n'
        ).encode("ascii")

    def scored_delta(self, text: str, logprobs: list[Any]) -> bytes:
        """A piece of the text."""
        return self.event(_DELTA, **self._place, delta=text, logprobs=logprobs)

    def tail(self, answer: dict[str, Any]) -> list[bytes]:
        """What comes after the text."""
        (item,) = answer["output"]
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self.event("response.output_text.done", **self._place, **text),
            self.event("response.content_part.done", **self._place, part=part),
            self.event("response.output_item.done", output_index=0, item=item),
            self.end(answer),
        ]

    def end(self, answer: dict[str, Any]) -> bytes:
        """The last event, whatever came before."""
        return self.event(f"response.{answer['status']}", response=answer)

    def event(self, name: str, **fields: Any) -> bytes:
        """The next event."""
        return named_event(name, sequence_number=self._number(), **fields)

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number


class ResponseEvents:
    """The events of an answer that is being made.

    `finish` makes the whole answer and keeps it, with how it was cut, before the last event.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        finish: Callable[[Choice, Usage, bytes], Awaitable[ResponsesAnswer]],
    ) -> None:
        self._writer = writer
        self._finish = finish
        self._events = _Events(writer.item_id)

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """From `response.created` to `response.completed` or `response.incomplete`."""
        writer, write = self._writer, self._events
        for event in write.head(writer.answer("in_progress", []).model_dump()):
            yield event
        choice, cuts = Choice(), array(_CUTS)
        logprobs = writer.chat.logprobs_writer()
        async for _, parts, output in outputs:
            choice.add(parts, output)
            text = text_of(parts)
            if logprobs is not None and output.logprobs:
                scored = logprobs.generated(output.logprobs, hides_last=output.hides_last)
                entries = scored["content"]
                cuts.extend((len(text), len(entries)))
                yield write.scored_delta(text, entries)
            elif text:
                cuts.extend((len(text), 0))
                yield write.delta(text)
        whole = await self._finish(choice, outputs.tally.usage(), cuts.tobytes())
        for event in await aside(choice, lambda: write.tail(whole.model_dump())):
            yield event

    def error_event(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        return self._events.end(self._writer.failed(error).model_dump())


async def aside(choice: Choice, write: Callable[[], T]) -> T:
    """What `write` makes of a choice, off the event loop if log-probabilities make that slow."""
    return await asyncio.to_thread(write) if choice.logprobs else write()


def replayed(response: StoredResponse, starting_after: int | None) -> Iterator[bytes]:
    """The events of an answer that has ended, those up to number `starting_after` left out.

    They are the ones it was streamed as; if it was not, its text is one piece. Raises
    InvalidRequest.
    """
    answer = json.loads(response.answer)
    if answer["status"] == "cancelled":
        raise InvalidRequest("A cancelled response has no events.", param="stream")
    num_pieces = 1 if response.cuts is None else len(array(_CUTS, response.cuts)) // 2
    last = 2 if not answer["output"] else 4 + num_pieces + 3
    first = 0 if starting_after is None else starting_after + 1
    if first > last + 1:
        raise InvalidRequest(
            f"starting_after must be at most {last}, the number of the last event.",
            param="starting_after",
        )
    return (event for i, event in enumerate(_all_events(answer, response.cuts)) if i >= first)


def _all_events(answer: dict[str, Any], cuts: bytes | None) -> Iterator[bytes]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "error": None}
    begun |= {"completed_at": None, "incomplete_details": None}
    if not answer["output"]:
        write = _Events("")
        yield from write.created(begun)
        yield write.end(answer)
        return
    (item,) = answer["output"]
    (part,) = item["content"]
    write = _Events(item["id"])
    yield from write.head(begun)
    yield from (write.scored_delta(text, scored) for text, scored in _pieces(part, cuts))
    yield from write.tail(answer)


def _pieces(part: dict[str, Any], cuts: bytes | None) -> Iterator[tuple[str, list[Any]]]:
    if cuts is None:
        yield part["text"], part["logprobs"]
        return
    sizes = array(_CUTS, cuts)
    text_at = logprobs_at = 0
    for num_chars, num_logprobs in zip(sizes[::2], sizes[1::2], strict=True):
        yield (
            part["text"][text_at : text_at + num_chars],
            part["logprobs"][logprobs_at : logprobs_at + num_logprobs],
        )
        text_at, logprobs_at = text_at + num_chars, logprobs_at + num_logprobs
