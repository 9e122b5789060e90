"""`POST /v1/chat/completions`: a conversation continued by its next answer."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.answers.format import AnswerFormat
from serve.answers.known import REASONING
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.convert import Limit, LogprobWish, capped_logprobs, truncated, wishes
from serve.api.answering.endpoint import Call, Endpoint, json_response, openai_caller, rendered
from serve.api.answering.generation import Job
from serve.api.errors import Unsupported
from serve.api.openai.chat_answer import ChatAnswer
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import ChatCompletion, ChatCompletionRequest
from serve.api.protocol.control import RenderedRequest
from serve.api.service import Service
from serve.engine.public_ids import CHAT
from serve.errors import InvalidRequest

_TAIL = 32
"""The last tokens of a prompt, among which the marker is that opens the reasoning."""


def chat_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["generation"], responses=dict(ERROR_RESPONSES))
    body = request_body(ChatCompletionRequest)
    chat = Endpoint(
        ChatCompletionRequest,
        "chat.completion",
        "chat.completion.chunk",
        openai_caller(CHAT),
        _prepare_chat,
    )

    @router.post("/v1/chat/completions", response_model=ChatCompletion, openapi_extra=body)
    async def create_chat_completion(request: Request) -> Response:
        return await chat.answered(request, service)

    @router.post("/v1/chat/completions/render", response_model=RenderedRequest, openapi_extra=body)
    async def render_chat(request: Request) -> Response:
        (answer,) = await rendered(chat, request, service)
        return json_response(answer)

    return router


async def prepare(
    body: ChatCompletionRequest, call: Call, *, tells_reasoning_apart: bool = False
) -> ChatAnswer:
    """Validate everything, render and tokenize. Raises RequestError."""
    _refuse_tools(body)
    field = _limit_field(body)
    limit = Limit(field, getattr(body, field), least=1)
    wish = await wishes(body, call, limit, _logprob_wish(body, call))
    prompt = await conversation_ids(body.messages, body, call.engine.tokenizer, call.service.config)
    job = wish.job(call, [truncated(prompt, body, call.engine)], "messages")
    return ChatAnswer(
        body=body,
        job=await _with_reasoning(job, call) if tells_reasoning_apart else job,
        envelope=call.envelope,
        names=wish.names,
        num_top=wish.num_top,
    )


async def _prepare_chat(body: ChatCompletionRequest, call: Call) -> ChatAnswer:
    return await prepare(body, call, tells_reasoning_apart=True)


async def _with_reasoning(job: Job, call: Call) -> Job:
    """The job, whose answer's reasoning is told apart if the server knows how it is written."""
    markers = REASONING.get(call.service.config.reasoning_parser)
    if markers is None or job.sampling.grammar is not None:  # a form leaves no room for it
        return job
    form = AnswerFormat(reasoning=markers)
    tail = await call.engine.tokenizer.decode(job.prompts[0][-_TAIL:], skip_special_tokens=False)
    return replace(job, reasoning=form, in_reasoning=form.begins_in_reasoning(tail))


def _limit_field(body: ChatCompletionRequest) -> str:
    """The newer name wins; without either the answer may fill the context."""
    newer = body.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _logprob_wish(body: ChatCompletionRequest, call: Call) -> LogprobWish:
    field, cap = "top_logprobs", call.service.config.max_logprobs
    num_top = capped_logprobs(body.top_logprobs, cap, field)
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param=field)
    return LogprobWish(field, (num_top or 0) if body.logprobs else None)


def _refuse_tools(body: ChatCompletionRequest) -> None:
    if body.tools and body.tool_choice != "none":
        raise Unsupported(
            "Tool calling is not supported; leave tools out, or set tool_choice to 'none'.",
            param="tools",
        )
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
    if (body.model_extra or {}).get("echo"):
        raise Unsupported("echo belongs to /v1/completions.", param="echo")
