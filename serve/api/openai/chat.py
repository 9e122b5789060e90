"""`POST /v1/chat/completions`: a conversation continued by its next answer."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.answers.format import AnswerFormat
from serve.answers.known import CALLS, REASONING
from serve.api.answering.conversation import conversation_ids
from serve.api.answering.convert import Limit, LogprobWish, capped_logprobs, truncated, wishes
from serve.api.answering.endpoint import Call, Endpoint, json_response, openai_caller, rendered
from serve.api.answering.generation import Job
from serve.api.answering.tools import AskedTools, asked_tools
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


async def prepare(body: ChatCompletionRequest, call: Call) -> ChatAnswer:
    """Validate everything, render and tokenize; the answer will be text. Raises RequestError."""
    if body.tools and body.tool_choice != "none":
        raise Unsupported(
            "tools are taken by /v1/chat/completions only; leave them out, or set tool_choice to "
            "'none'.",
            param="tools",
        )
    return await _prepared(body, call, apart=False)


async def _prepare_chat(body: ChatCompletionRequest, call: Call) -> ChatAnswer:
    return await _prepared(body, call, apart=True)


async def _prepared(body: ChatCompletionRequest, call: Call, *, apart: bool) -> ChatAnswer:
    """`apart`: tell reasoning and tool calls apart from the text."""
    if (body.model_extra or {}).get("echo"):
        raise Unsupported("echo belongs to /v1/completions.", param="echo")
    config = call.service.config
    tools = await asked_tools(body, config)
    field = _limit_field(body)
    limit = Limit(field, getattr(body, field), least=1)
    wish = await wishes(body, call, limit, _logprob_wish(body, call))
    if tools is not None and wish.sampling.grammar is not None:
        raise Unsupported("tools and a form of the answer exclude each other.", param="tools")
    told = body.tools if tools is not None else None
    prompt = await conversation_ids(body.messages, body, call.engine.tokenizer, config, told)
    job = wish.job(call, [truncated(prompt, body, call.engine)], "messages")
    return ChatAnswer(
        body=body,
        job=await _told_apart(job, tools, call) if apart else job,
        envelope=call.envelope,
        names=wish.names,
        num_top=wish.num_top,
        names_tool=tools is not None and tools.is_named,
    )


async def _told_apart(job: Job, tools: AskedTools | None, call: Call) -> Job:
    """The job, of whose answer reasoning and calls are told apart as far as the server knows how
    the model writes them."""
    config, sampling = call.service.config, job.sampling
    markers = None
    if sampling.grammar is None:  # another form leaves no room for reasoning
        markers = REASONING.get(config.reasoning_parser)
    if markers is None and tools is None:
        return job
    calls = None
    if tools is not None:
        calls = CALLS[config.tool_call_parser]
        job = replace(
            job,
            tools=tools.names,
            sampling=replace(sampling, grammar=tools.grammar),
            relaxed=tools.relaxed,
        )
    form, opened = AnswerFormat(reasoning=markers, calls=calls), False
    if markers is not None and not (tools is not None and tools.must_call):
        tail = job.prompts[0][-_TAIL:]
        text = await call.engine.tokenizer.decode(tail, skip_special_tokens=False)
        opened = form.begins_in_reasoning(text)
    return replace(job, form=form, in_reasoning=opened)


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
