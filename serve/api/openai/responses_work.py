"""What `/v1/responses` does: answers over the chat path, kept for later requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from serve.api.answering.choices import Choice
from serve.api.answering.chunks import new_envelope
from serve.api.answering.endpoint import Call, Caller, Endpoint, whole
from serve.api.answering.field_names import fields_named
from serve.api.answering.generation import Outputs, Tally
from serve.api.answering.scores import Scores
from serve.api.clients.client import Client
from serve.api.errors import misfits_refused
from serve.api.openai import chat
from serve.api.openai.response_store import (
    BackgroundResponses,
    ResponseStore,
    StoredResponse,
)
from serve.api.openai.responses_answer import ResponseWriter
from serve.api.openai.responses_events import ResponseEvents, aside, replayed
from serve.api.openai.responses_items import Conversation, item_fields, said_item
from serve.api.openai.responses_request import chat_request, field_names, refuse_unsupported
from serve.api.openai.truncation import drop_oldest
from serve.api.protocol.common import Usage
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
        self._endpoint = Endpoint(ResponsesRequest, "response", "response", _caller, self._prepare)

    async def create(self, request: Request) -> Response:
        """Answer a request, or begin to. Raises RequestError and EngineError."""
        body = await self._endpoint.read(request, self._service)
        if body.background:
            self._background.check_room()
        if not body.background:
            return await self._endpoint.answer(request, self._service, body)
        answer, outputs = await self._endpoint.begin(request, self._service, body)
        writer = answer.writer
        begun = writer.answer("in_progress", []).model_dump_json().encode()
        stored = StoredResponse(writer.given, (), begun)
        self._background.start(writer.response_id, stored, _finish_later(answer, outputs))
        return _json(begun)

    async def num_input_tokens(self, body: ResponsesRequest) -> int:
        """How long the input is that the request would have. Raises RequestError."""
        engine = self._service.engine_for(body.model)
        envelope = new_envelope(engine, body.model, "response", RESPONSE)
        answer = await self._prepare(body, Call(self._service, engine, envelope, Client()))
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

    async def _prepare(self, body: ResponsesRequest, call: Call) -> _Answer:
        """Ready to run. Raises RequestError."""
        config = call.service.config
        refuse_unsupported(body)
        conversation = Conversation(body, self._store, config.max_request_bytes)
        with fields_named(lambda: {"messages": "input"}), misfits_refused():
            asked = chat_request(body, conversation.messages)
        paths = [*(["instructions"] if body.instructions else []), *conversation.paths]
        with fields_named(lambda: field_names(asked, paths)):
            if body.truncation == "auto":
                kept = await drop_oldest(asked, call.engine, config)
                paths[:] = [paths[i] for i in kept]
            answer = await chat.prepare(asked, call)
        item_id = MESSAGE + uuid.uuid4().hex
        writer = ResponseWriter(body, answer, tuple(conversation.items), item_id)
        return _Answer(writer, paths, self._store)


class _Answer:
    """A request, ready to run, to be answered and to be kept. `paths` says where each of its
    messages stands."""

    def __init__(self, writer: ResponseWriter, paths: list[str], store: ResponseStore) -> None:
        self.writer = writer
        self.job = writer.chat.job
        self.streams = bool(writer.body.stream)
        self._paths = paths
        self._store = store
        events = ResponseEvents(writer, self._finish)
        self.events, self.error_event = events.events, events.error_event

    def field_names(self) -> dict[str, str]:
        """What the chat path's words are called in the request."""
        return field_names(self.writer.chat.body, self._paths)

    def scores(self) -> list[Scores]:
        """None: the choice keeps its log-probabilities, since they are stored as well."""
        return []

    async def whole(self, choices: Sequence[Choice], tally: Tally) -> Response:
        """The answer in one piece."""
        (choice,) = choices
        answer = await aside(choice, lambda: self.writer.whole(choice, tally.usage()))
        return _json(self.keep(answer, await aside(choice, lambda: _dumped(answer))))

    async def _finish(self, choice: Choice, usage: Usage, cuts: bytes) -> ResponsesAnswer:
        answer = await aside(choice, lambda: self.writer.whole(choice, usage))
        self.keep(answer, await aside(choice, lambda: _dumped(answer)), cuts)
        return answer

    def keep(self, answer: ResponsesAnswer, raw: bytes, cuts: bytes | None = None) -> bytes:
        """Store the answer, if it is to be, as its JSON, which is also what is returned."""
        if self.writer.stores:
            said = tuple(said_item(message) for message in answer.output)
            self._store.put(answer.id, StoredResponse(self.writer.given, said, raw, cuts))
        return raw


async def _finish_later(answer: _Answer, outputs: Outputs) -> None:
    """`whole` with nobody waiting: how it ends is kept, whatever happens."""
    writer = answer.writer
    try:
        await whole(answer, outputs)
        return
    except asyncio.CancelledError:
        end = writer.answer("cancelled", [])
    except ServeError as error:
        end = writer.failed(error)
    except Exception as error:
        logger.exception("a background response failed")
        end = writer.failed(error)
    answer.keep(end, _dumped(end))


def _caller(body: ResponsesRequest, request: Request) -> Caller:
    return Caller(body.model, bool(body.stream), body.user, RESPONSE + uuid.uuid4().hex)


def _dumped(answer: ResponsesAnswer) -> bytes:
    return answer.model_dump_json().encode()


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
