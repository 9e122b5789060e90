"""`POST /v1/chat/completions`: a conversation continued by its next answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.body import read_body
from serve.api.chunks import ChunkWriter, Envelope, new_envelope, text_json
from serve.api.clients import Client
from serve.api.conversation import conversation_ids
from serve.api.convert import (
    LogprobCounts,
    cache_salt,
    capped_logprobs,
    completion_limit,
    num_choices,
    refuse_unsupported,
    sampling_params,
    timeout_header,
    truncated,
)
from serve.api.errors import Unsupported
from serve.api.generation import Choice, Job, Outputs, Tally, collect, in_intervals
from serve.api.logprobs import ChatLogprobsWriter, TokenNames, prompt_logprobs
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.api.streaming import DONE, EventStream, unless_gone
from serve.engine.outputs import RequestOutput
from serve.errors import InvalidRequest, RequestError


def chat_routes(service: Service) -> APIRouter:
    """The route of this file."""
    router = APIRouter(tags=["generation"])
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=dict(ERROR_RESPONSES),
        openapi_extra=request_body(ChatCompletionRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, max_bytes)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        label = body.request_id or request_id_of(request)
        envelope = new_envelope(service, body.model, kind, f"chatcmpl-{label}")
        body.timeout = body.timeout or timeout_header(request)
        client = service.client_of(request, body.user)
        task = await prepare(body, service, envelope, client)
        outputs = begin(task, service)
        if body.stream:
            return EventStream(events(task, body, outputs), outputs)
        choices, _ = await unless_gone(request, collect(outputs))
        answer = whole_answer(task, body, choices, outputs.tally)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A request, ready to run and to be answered."""

    job: Job
    envelope: Envelope
    names: TokenNames
    num_top: int | None  # `top_logprobs`, if logprobs are wanted
    gives_prompt_logprobs: bool
    gives_token_ids: bool

    @property
    def prompt_ids(self) -> list[int]:
        """The rendered conversation."""
        return self.job.prompts[0]


async def prepare(
    body: ChatCompletionRequest,
    service: Service,
    envelope: Envelope,
    client: Client = Client(),  # noqa: B008 (frozen)
) -> ChatTask:
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
    return ChatTask(
        job=Job(
            label=envelope.id,
            prompts=[truncated(prompt, body, service)],
            sampling=sampling,
            n=n,
            priority=body.priority or 0,
            timeout_s=body.timeout,
            client=client,
            cache_salt=cache_salt(body.cache_salt),
            continues_prompt=False,
        ),
        envelope=envelope,
        names=TokenNames(tokenizer, as_ids, sampling.skip_special_tokens),
        num_top=num_top,
        gives_prompt_logprobs=num_prompt is not None,
        gives_token_ids=bool(body.return_token_ids),
    )


def begin(task: ChatTask, service: Service) -> Outputs:
    """Hand the task to the engine. Raises RequestError in the words of this API."""
    try:
        return Outputs(service, task.job)
    except RequestError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer name wins; without either the answer may fill the context."""
    if body.max_completion_tokens is not None:
        return completion_limit(body.max_completion_tokens, 1, "max_completion_tokens")
    return completion_limit(body.max_tokens, 1, "max_tokens")


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


def whole_answer(
    task: ChatTask, body: ChatCompletionRequest, choices: list[Choice], tally: Tally
) -> ChatCompletion:
    """The answer without streaming."""
    extras: dict[str, Any] = {}
    if task.gives_prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, task.names)
    if task.gives_token_ids:
        extras["prompt_token_ids"] = task.prompt_ids
    if body.return_metrics:
        extras["metrics"] = tally.metrics()
    return ChatCompletion(
        **task.envelope.fields(),
        choices=[_answer_choice(task, index, choice) for index, choice in enumerate(choices)],
        usage=tally.usage(),
        **extras,
    )


def _answer_choice(task: ChatTask, index: int, choice: Choice) -> ChatChoice:
    logprobs: Any = None
    if task.num_top is not None:
        writer = ChatLogprobsWriter(task.num_top, task.names)
        logprobs = writer.generated(choice.logprobs, hides_last=choice.hides_last)
    extras: dict[str, Any] = {"token_ids": choice.token_ids} if task.gives_token_ids else {}
    return ChatChoice(
        index=index,
        message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
        logprobs=logprobs,
        finish_reason=choice.ended_by,
        stop_reason=choice.stop_reason,
        **extras,
    )


async def events(
    task: ChatTask, body: ChatCompletionRequest, outputs: Outputs
) -> AsyncIterator[bytes]:
    """The answer as server-sent events: per choice a role, its text, and why it ended."""
    chunks = ChunkWriter(
        task.envelope, body.stream_options, outputs.tally, tells_metrics=bool(body.return_metrics)
    )
    choices = [_ChoiceStream(task, index, chunks) for index in range(task.job.num_choices)]
    async for index, output in in_intervals(outputs, body.stream_interval):
        if event := choices[index].events(output):
            yield event
    yield chunks.figures_chunk() + DONE


class _ChoiceStream:
    """Turns one choice's outputs into events."""

    def __init__(self, task: ChatTask, index: int, chunks: ChunkWriter) -> None:
        self._task = task
        self._index = index
        self._chunks = chunks
        self._begun = False
        self._logprobs = (
            ChatLogprobsWriter(task.num_top, task.names) if task.num_top is not None else None
        )

    def events(self, output: RequestOutput) -> bytes:
        """The events an output amounts to; none if there is nothing to say yet."""
        events = b""
        if payload := self._payload(output):
            events = self._chunks.chunk(self._index, payload)
        if output.finish_reason is not None:
            events += self._chunks.last_chunk(
                self._index, '"delta":{},"logprobs":null', output.finish_reason, output.stop_reason
            )
        if events and not self._begun:
            self._begun = True
            events = self._chunks.chunk(self._index, self._role_payload()) + events
        return events

    def _role_payload(self) -> str:
        extras = ""
        if self._task.gives_token_ids:
            extras = f',"prompt_token_ids":{self._task.prompt_ids}'
        return f'"delta":{{"role":"assistant","content":""}},"logprobs":null{extras}'

    def _payload(self, output: RequestOutput) -> str:
        logprobs, ids = "null", ""
        if self._logprobs is not None and output.logprobs:
            logprobs = json.dumps(
                self._logprobs.generated(output.logprobs, hides_last=output.hides_last)
            )
        elif not output.text and not (self._task.gives_token_ids and output.token_ids):
            return ""
        if self._task.gives_token_ids:
            ids = f',"token_ids":{output.token_ids}'
        return f'"delta":{{"content":{text_json(output.text)}}},"logprobs":{logprobs}{ids}'
