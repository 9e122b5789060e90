"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the chat path."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.endpoint import Call, Caller, Endpoint
from serve.api.answering.field_names import fields_named
from serve.api.anthropic.answer import MessageAnswer, json_response
from serve.api.anthropic.cache_control import Written, marked_prefix, pin_common
from serve.api.anthropic.errors import ERROR_TYPES
from serve.api.anthropic.request import FIELD_NAMES, chat_messages, chat_request, counted_request
from serve.api.errors import misfits_refused
from serve.api.middleware import request_id_of
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
    messages = Endpoint(MessagesRequest, "message", "message", _caller, prepare)

    @router.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        openapi_extra=request_body(MessagesRequest),
    )
    async def create_message(request: Request) -> Response:
        return await messages.answered(request, service)

    @router.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        openapi_extra=request_body(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensRequest, max_bytes)
        engine = service.engine_for(body.model)
        with misfits_refused():
            asked = counted_request(body)
        tokenizer, config = engine.tokenizer, service.config
        ids = await conversation_ids(asked.messages, asked, tokenizer, config)
        return json_response(TokenCount(input_tokens=len(ids)))

    return router


async def prepare(body: MessagesRequest, call: Call) -> MessageAnswer:
    """Validate everything, tokenize, and keep what is marked. Raises RequestError."""
    with fields_named(lambda: FIELD_NAMES):
        with misfits_refused():
            asked = chat_request(body)
        job = (await chat.prepare(asked, call)).job
        written = await _pin_marked(body, job.prompts[0], call)
    request_id = call.envelope.id.removeprefix(MESSAGE)
    return MessageAnswer(job, bool(body.stream), call.envelope, written, request_id)


async def _pin_marked(body: MessagesRequest, prompt_ids: list[int], call: Call) -> Written:
    """Keep what `cache_control` marks."""
    marked = marked_prefix(body)
    if marked is None:
        return Written()
    fields = TemplateFields(add_generation_prompt=False)
    tokenizer, config = call.engine.tokenizer, call.service.config
    ids = await conversation_ids(chat_messages(marked.body), fields, tokenizer, config)
    return await pin_common(call.engine, prompt_ids, ids, marked.ttl_s)


def _caller(body: MessagesRequest, request: Request) -> Caller:
    user = (body.metadata or {}).get("user_id")
    known = user if isinstance(user, str) else None
    return Caller(body.model, bool(body.stream), known, MESSAGE + request_id_of(request))
