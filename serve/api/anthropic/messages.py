"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the chat path."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.answering.choices import collect
from serve.api.answering.chunks import new_envelope
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.convert import timeout_header
from serve.api.answering.field_names import fields_named
from serve.api.answering.generation import Outputs
from serve.api.answering.streaming import EventStream, unless_gone
from serve.api.anthropic.answer import MessageWriter, json_response
from serve.api.anthropic.cache_control import Written, marked_prefix, pin_common
from serve.api.anthropic.errors import ERROR_TYPES, error_event
from serve.api.anthropic.request import FIELD_NAMES, chat_messages, chat_request, counted_request
from serve.api.errors import misfits_refused
from serve.api.openai import chat
from serve.api.openapi import request_body
from serve.api.protocol.anthropic import (
    AnthropicError,
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from serve.api.protocol.chat import TemplateFields
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.engine.public_ids import MESSAGE


def anthropic_routes(service: Service) -> APIRouter:
    """The routes of this file; `AnthropicErrors` gives their errors Anthropic's shape."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicError, "description": kind}
        for status, kind in ERROR_TYPES.items()
    }
    router = APIRouter(tags=["anthropic"], responses=responses)
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        openapi_extra=request_body(MessagesRequest),
    )
    async def create_message(request: Request) -> Response:
        return await _answered(request, service)

    @router.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        openapi_extra=request_body(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensRequest, max_bytes)
        service.served_name(body.model)
        with misfits_refused():
            asked = counted_request(body)
        tokenizer = service.engine.tokenizer
        ids = await conversation_ids(asked.messages, asked, tokenizer, service.config)
        return json_response(TokenCount(input_tokens=len(ids)))

    return router


async def _answered(request: Request, service: Service) -> Response:
    body = await read_body(request, MessagesRequest, service.config.max_request_bytes)
    request_id = request_id_of(request)
    envelope = new_envelope(service, body.model, "message", MESSAGE + request_id)
    with fields_named(lambda: FIELD_NAMES):
        with misfits_refused():
            asked = chat_request(body)
        asked.timeout = timeout_header(request)
        client = service.client_of(request, _user(body))
        answer = await chat.prepare(asked, service, envelope, client)
        written = await _pin_marked(body, answer.job.prompts[0], service)
        outputs = Outputs(service, answer.job)
    writer = MessageWriter(envelope, written)
    if body.stream:
        return EventStream(
            writer.events(outputs),
            outputs,
            error_event=lambda error: error_event(error, request_id),
        )
    (choice,) = await unless_gone(request, collect(outputs))
    return json_response(writer.whole(choice, outputs.tally.usage()))


async def _pin_marked(body: MessagesRequest, prompt_ids: list[int], service: Service) -> Written:
    """Keep what `cache_control` marks."""
    marked = marked_prefix(body)
    if marked is None:
        return Written()
    fields = TemplateFields(add_generation_prompt=False)
    engine = service.engine
    messages = chat_messages(marked.body)
    ids = await conversation_ids(messages, fields, engine.tokenizer, service.config)
    return await pin_common(engine, prompt_ids, ids, marked.ttl_s)


def _user(body: MessagesRequest) -> str | None:
    user = (body.metadata or {}).get("user_id")
    return user if isinstance(user, str) else None
