"""`POST /v1/chat/completions`: a conversation continued by its next answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.chunks import Envelope
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.convert import (
    LogprobCounts,
    cache_salt,
    capped_logprobs,
    completion_limit,
    num_choices,
    refuse_unsupported,
    sampling_params,
    truncated,
)
from serve.api.answering.endpoint import Endpoint, json_response
from serve.api.answering.generation import Job
from serve.api.answering.logprobs import TokenNames
from serve.api.clients.client import Client
from serve.api.errors import Unsupported
from serve.api.openai.chat_answer import ChatAnswer
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import ChatCompletion, ChatCompletionRequest
from serve.api.protocol.control import RenderedRequest
from serve.api.service import Service
from serve.engine.public_ids import CHAT
from serve.errors import InvalidRequest


def chat_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["generation"], responses=dict(ERROR_RESPONSES))
    body = request_body(ChatCompletionRequest)
    chat = Endpoint(
        ChatCompletionRequest, CHAT, "chat.completion", "chat.completion.chunk", prepare
    )

    @router.post("/v1/chat/completions", response_model=ChatCompletion, openapi_extra=body)
    async def create_chat_completion(request: Request) -> Response:
        return await chat.answered(request, service)

    @router.post("/v1/chat/completions/render", response_model=RenderedRequest, openapi_extra=body)
    async def render_chat(request: Request) -> Response:
        (rendered,) = await chat.rendered(request, service)
        return json_response(rendered)

    return router


async def prepare(
    body: ChatCompletionRequest, service: Service, envelope: Envelope, client: Client
) -> ChatAnswer:
    """Validate everything, render and tokenize. Raises RequestError."""
    refuse_unsupported(body)
    _refuse_tools_and_formats(body)
    n = num_choices(body)
    num_top = _top_logprobs(body, service)
    num_prompt = capped_logprobs(body.prompt_logprobs, service, "prompt_logprobs")
    counts = LogprobCounts(generated=num_top, prompt=num_prompt)
    sampling = await sampling_params(body, service, _max_tokens(body), counts)
    tokenizer = service.engine.tokenizer
    prompt = await conversation_ids(body.messages, body, tokenizer, service.config)
    as_ids = bool(body.return_tokens_as_token_ids)
    return ChatAnswer(
        body=body,
        job=Job(
            label=envelope.id,
            prompts=[truncated(prompt, body, service)],
            sampling=sampling,
            n=n,
            gathers=not body.stream,
            priority=body.priority or 0,
            timeout_s=body.timeout,
            client=client,
            cache_salt=cache_salt(body.cache_salt),
            prompt_field="messages",
            limit_field=_limit_field(body),
        ),
        envelope=envelope,
        names=TokenNames(tokenizer, as_ids, sampling.skip_special_tokens),
        num_top=num_top,
    )


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer name wins; without either the answer may fill the context."""
    field = _limit_field(body)
    return completion_limit(getattr(body, field), 1, field)


def _limit_field(body: ChatCompletionRequest) -> str:
    newer = body.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _top_logprobs(body: ChatCompletionRequest, service: Service) -> int | None:
    num_top = capped_logprobs(body.top_logprobs, service, "top_logprobs")
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return (num_top or 0) if body.logprobs else None


def _refuse_tools_and_formats(body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise Unsupported(
            "Tool calling is not supported; leave tools out, or set tool_choice to 'none'.",
            param="tools",
        )
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if (body.model_extra or {}).get("echo"):
        raise Unsupported("echo belongs to /v1/completions.", param="echo")
    if body.response_format is not None:
        _check_response_format(body.response_format)


def _check_response_format(wanted: Any) -> None:
    if not isinstance(wanted, dict) or "type" not in wanted:
        raise InvalidRequest(
            "response_format must be an object with a type, such as {'type': 'text'}.",
            param="response_format",
        )
    if wanted["type"] not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            "response_format.type must be 'text', 'json_object' or 'json_schema'.",
            param="response_format.type",
        )
    if wanted["type"] == "json_schema" and not isinstance(wanted.get("json_schema"), dict):
        raise InvalidRequest(
            "response_format.json_schema must be an object with a name and a schema.",
            param="response_format.json_schema",
        )
    if wanted["type"] != "text":
        raise Unsupported(
            "Structured output is not supported; only {'type': 'text'} is.",
            param="response_format",
        )
