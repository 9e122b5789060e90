"""`POST /v1/responses`: OpenAI's Responses API over the chat path."""

from __future__ import annotations

import asyncio
import logging
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api import chat
from serve.api.body import read_body
from serve.api.choices import collect
from serve.api.chunks import new_envelope
from serve.api.convert import timeout_header
from serve.api.errors import NotStored, misfits_refused
from serve.api.generation import Outputs
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import Message
from serve.api.protocol.responses import DeletedResponse, ResponsesAnswer, ResponsesRequest
from serve.api.response_store import BackgroundResponses, ResponseStore, StoredResponse
from serve.api.responses_answer import ResponseEvents, ResponseWriter
from serve.api.responses_request import chat_request, refuse_unsupported, turns
from serve.api.service import Service
from serve.api.streaming import EventStream, unless_gone
from serve.engine.public_ids import RESPONSE
from serve.errors import InvalidRequest, RequestError, ServeError

logger = logging.getLogger(__name__)

# Fields of the chat path under the names they have here.
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


def responses_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["responses"], responses=dict(ERROR_RESPONSES))
    responses = _Responses(service)

    @router.post(
        "/v1/responses",
        response_model=ResponsesAnswer,
        openapi_extra=request_body(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        return await responses.create(request)

    @router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer)
    async def get_response(response_id: str) -> Response:
        return _json(responses.find(response_id))

    @router.post("/v1/responses/{response_id}/cancel", response_model=ResponsesAnswer)
    async def cancel_response(response_id: str) -> Response:
        return _json(await responses.cancel(response_id))

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def delete_response(response_id: str) -> DeletedResponse:
        responses.delete(response_id)
        return DeletedResponse(id=response_id)

    return router


class _Responses:
    """What the routes do; owns the answers that are kept and those that are being made."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()
        self._background = BackgroundResponses()

    async def create(self, request: Request) -> Response:
        """Answer a request, or begin to."""
        service = self._service
        body = await read_body(request, ResponsesRequest, service.config.max_request_bytes)
        writer, outputs = await self._begin(request, body)
        if body.stream:

            def keep(answer: ResponsesAnswer, text: str) -> None:
                self._keep(writer, answer, text)

            stream = ResponseEvents(writer, outputs, keep)
            return EventStream(stream.events(), outputs, error_event=stream.failed)
        if body.background:
            begun = writer.answer("in_progress", []).model_dump_json().encode()
            work = self._finish_later(writer, outputs)
            self._background.start(writer.response_id, begun, work)
            return _json(begun)
        return _json(await unless_gone(request, self._finish(writer, outputs)))

    def find(self, response_id: str) -> bytes:
        """An answer, or what there is of it. Raises NotStored."""
        return self._background.begun(response_id) or self._stored(response_id).answer

    async def cancel(self, response_id: str) -> bytes:
        """End a background response. Raises NotStored; InvalidRequest if it has ended."""
        if self._background.begun(response_id) is None:
            self._stored(response_id)
            raise InvalidRequest("Only a background response that has not ended can be cancelled.")
        await self._background.cancel(response_id)
        return self._stored(response_id).answer

    def delete(self, response_id: str) -> None:
        """Forget an answer. Raises NotStored."""
        if not self._store.delete(response_id):
            raise _not_stored(response_id)

    async def _begin(
        self, request: Request, body: ResponsesRequest
    ) -> tuple[ResponseWriter, Outputs]:
        service = self._service
        refuse_unsupported(body)
        envelope = new_envelope(service, body.model, "response", RESPONSE + uuid.uuid4().hex)
        client = service.client_of(request, body.user)
        try:
            with misfits_refused():
                messages = [*self._earlier(body), *turns(body)]
                asked = chat_request(body, messages)
                asked.timeout = timeout_header(request)
                answer = await chat.prepare(asked, service, envelope, client)
            outputs = Outputs(service, answer.job)
        except RequestError as error:
            error.param = _PARAMS.get((error.param or "").partition(".")[0], error.param)
            raise
        return ResponseWriter(body, answer, messages, f"msg_{uuid.uuid4().hex}"), outputs

    def _earlier(self, body: ResponsesRequest) -> list[Message]:
        if body.previous_response_id is None:
            return []
        return self._stored(body.previous_response_id).messages

    async def _finish(self, writer: ResponseWriter, outputs: Outputs) -> bytes:
        (choice,) = await collect(outputs)
        return self._keep(writer, writer.whole(choice, outputs.tally.usage()), choice.text)

    async def _finish_later(self, writer: ResponseWriter, outputs: Outputs) -> None:
        """`_finish` with nobody waiting: how it ends is kept, whatever happens."""
        try:
            await self._finish(writer, outputs)
        except asyncio.CancelledError:
            self._keep(writer, writer.answer("cancelled", []), None)
        except ServeError as error:
            self._keep(writer, writer.failed(error), None)
        except Exception as error:
            logger.exception("a background response failed")
            self._keep(writer, writer.failed(error), None)

    def _keep(self, writer: ResponseWriter, answer: ResponsesAnswer, said: str | None) -> bytes:
        """The answer as JSON, which is also what is stored; `said` None: it came to no end."""
        raw = answer.model_dump_json().encode()
        if writer.stores:
            turn = [] if said is None else [Message(role="assistant", content=said)]
            self._store.put(answer.id, StoredResponse([*writer.messages, *turn], raw))
        return raw

    def _stored(self, response_id: str) -> StoredResponse:
        response = self._store.get(response_id)
        if response is None:
            raise _not_stored(response_id)
        return response


def _not_stored(response_id: str) -> NotStored:
    return NotStored(
        f"No response {response_id[:100]!r} is stored here.", param="previous_response_id"
    )


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
