"""What `/v1/responses` does: answers over the chat path, kept for later requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from serve.api.answering.choices import collect
from serve.api.answering.chunks import Envelope, new_envelope
from serve.api.answering.convert import timeout_header
from serve.api.answering.field_names import fields_named
from serve.api.answering.generation import Outputs
from serve.api.answering.streaming import EventStream, unless_gone
from serve.api.clients.client import Client
from serve.api.errors import misfits_refused
from serve.api.openai import chat
from serve.api.openai.chat_answer import ChatAnswer
from serve.api.openai.response_store import (
    BackgroundResponses,
    ResponseStore,
    StoredItem,
    StoredResponse,
)
from serve.api.openai.responses_answer import ResponseWriter
from serve.api.openai.responses_events import ResponseEvents, replayed
from serve.api.openai.responses_items import Conversation, item_fields, said_item
from serve.api.openai.responses_request import chat_request, field_names, refuse_unsupported
from serve.api.openai.truncation import drop_oldest
from serve.api.protocol.chat import ChatCompletionRequest
from serve.api.protocol.responses import (
    InputItems,
    ItemOrder,
    ResponsesAnswer,
    ResponsesRequest,
)
from serve.api.service import Service
from serve.engine.public_ids import MESSAGE, RESPONSE
from serve.errors import InvalidRequest, ServeError

logger = logging.getLogger(__name__)


class Responses:
    """Owns the answers that are kept and those that are being made."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore(service.config)
        self._background = BackgroundResponses(service.config.max_background_responses)

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a request, or begin to. Raises RequestError and EngineError."""
        if body.background:
            self._background.check_room()
        writer, outputs = await self._begin(request, body)
        if body.stream:

            def keep(answer: ResponsesAnswer, cuts: bytes) -> None:
                self._keep(writer, answer, cuts)

            stream = ResponseEvents(writer, outputs, keep)
            return EventStream(stream.events(), outputs, error_event=stream.failed)
        if body.background:
            begun = writer.answer("in_progress", []).model_dump_json().encode()
            work = self._finish_later(writer, outputs)
            self._background.start(
                writer.response_id, StoredResponse(writer.given, (), begun), work
            )
            return _answered(begun)
        return _answered(await unless_gone(request, self._finish(writer, outputs)))

    async def num_input_tokens(self, body: ResponsesRequest) -> int:
        """How long the input is that the request would have. Raises RequestError."""
        envelope = new_envelope(self._service, body.model, "response", RESPONSE)
        wish = self._wish(body)
        with fields_named(wish.field_names):
            answer = await wish.prepared(self._service, envelope, Client())
        return len(answer.job.prompts[0])

    def find(self, response_id: str) -> StoredResponse:
        """An answer, or what there is of it. Raises NotStored."""
        return self._background.begun(response_id) or self._store.get(response_id)

    def replayed(self, response_id: str, starting_after: int | None) -> Iterator[bytes]:
        """The events of an answer that has ended. Raises NotStored and InvalidRequest."""
        if self._background.begun(response_id) is not None:
            raise InvalidRequest(
                "A background response is not streamed before it has ended: ask without stream.",
                param="stream",
            )
        return replayed(self._store.get(response_id), starting_after)

    def input_items(
        self, response_id: str, order: ItemOrder, limit: int, after: str | None
    ) -> InputItems:
        """A page of what an answer was given. Raises NotStored and InvalidRequest."""
        given = self.find(response_id).given
        items = given if order == "asc" else given[::-1]
        if after is not None:
            place = next((i for i, item in enumerate(items) if item.id == after), None)
            if place is None:
                raise InvalidRequest(
                    f"after: the response was given no item {after[:100]!r}.", param="after"
                )
            items = items[place + 1 :]
        page = items[:limit]
        return InputItems(
            data=[item_fields(item) for item in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(items) > limit,
        )

    async def cancel(self, response_id: str) -> bytes:
        """End a background response. Raises NotStored; InvalidRequest if it has ended."""
        if self._background.begun(response_id) is None:
            self._store.get(response_id)
            raise InvalidRequest(
                "Only a background response that has not ended can be cancelled.",
                param="response_id",
            )
        await self._background.cancel(response_id)
        return self._store.get(response_id).answer

    async def delete(self, response_id: str) -> None:
        """Forget an answer, and make it no further if it has not ended. Raises NotStored."""
        if self._background.begun(response_id) is not None:
            await self._background.cancel(response_id)
        self._store.delete(response_id)

    async def _begin(
        self, request: Request, body: ResponsesRequest
    ) -> tuple[ResponseWriter, Outputs]:
        service = self._service
        envelope = new_envelope(service, body.model, "response", RESPONSE + uuid.uuid4().hex)
        client = service.client_of(request, body.user)
        wish = self._wish(body)
        wish.asked.timeout = timeout_header(request)
        with fields_named(wish.field_names):
            answer = await wish.prepared(service, envelope, client)
            outputs = Outputs(service, answer.job)
        return ResponseWriter(body, answer, wish.given, MESSAGE + uuid.uuid4().hex), outputs

    def _wish(self, body: ResponsesRequest) -> _Wish:
        refuse_unsupported(body)
        conversation = Conversation(body, self._store, self._service.config.max_request_bytes)
        with fields_named(lambda: {"messages": "input"}), misfits_refused():
            asked = chat_request(body, conversation.messages)
        paths = [*(["instructions"] if body.instructions else []), *conversation.paths]
        return _Wish(body, asked, paths, tuple(conversation.items))

    async def _finish(self, writer: ResponseWriter, outputs: Outputs) -> bytes:
        (choice,) = await collect(outputs)
        return self._keep(writer, writer.whole(choice, outputs.tally.usage()))

    async def _finish_later(self, writer: ResponseWriter, outputs: Outputs) -> None:
        """`_finish` with nobody waiting: how it ends is kept, whatever happens."""
        try:
            await self._finish(writer, outputs)
        except asyncio.CancelledError:
            self._keep(writer, writer.answer("cancelled", []))
        except ServeError as error:
            self._keep(writer, writer.failed(error))
        except Exception as error:
            logger.exception("a background response failed")
            self._keep(writer, writer.failed(error))

    def _keep(
        self, writer: ResponseWriter, answer: ResponsesAnswer, cuts: bytes | None = None
    ) -> bytes:
        """The answer as JSON, which is also what is stored."""
        raw = answer.model_dump_json().encode()
        if writer.stores:
            said = tuple(said_item(message) for message in answer.output)
            self._store.put(answer.id, StoredResponse(writer.given, said, raw, cuts))
        return raw


@dataclass(slots=True)
class _Wish:
    """A request in the chat path's words; `paths` says where each of its messages stands."""

    body: ResponsesRequest
    asked: ChatCompletionRequest
    paths: list[str]
    given: tuple[StoredItem, ...]

    async def prepared(self, service: Service, envelope: Envelope, client: Client) -> ChatAnswer:
        """Ready to run. Raises RequestError."""
        if self.body.truncation == "auto":
            self.paths = [self.paths[i] for i in await drop_oldest(self.asked, service)]
        return await chat.prepare(self.asked, service, envelope, client)

    def field_names(self) -> dict[str, str]:
        """What the chat path's words are called in the request."""
        return field_names(self.asked, self.paths)


def _answered(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
