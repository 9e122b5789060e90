"""`POST /v1/completions`: a prompt, or several, continued as plain text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.body import read_body
from serve.api.chunks import ChunkWriter, Envelope, new_envelope, text_json
from serve.api.clients import Client
from serve.api.convert import (
    LogprobCounts,
    cache_salt,
    capped_logprobs,
    completion_limit,
    num_choices,
    prompt_ids,
    refuse_unsupported,
    sampling_params,
    timeout_header,
)
from serve.api.generation import Choice, Job, Outputs, Tally, collect, in_intervals
from serve.api.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    joined_logprobs,
    prompt_logprobs,
)
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.api.streaming import DONE, EventStream, unless_gone
from serve.engine.outputs import RequestOutput
from serve.messages import TokenLogprobs

DEFAULT_MAX_TOKENS = 16


def completion_routes(service: Service) -> APIRouter:
    """The route of this file."""
    router = APIRouter(tags=["generation"])
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses=dict(ERROR_RESPONSES),
        openapi_extra=request_body(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, max_bytes)
        label = body.request_id or request_id_of(request)
        envelope = new_envelope(service, body.model, "text_completion", f"cmpl-{label}")
        body.timeout = body.timeout or timeout_header(request)
        client = service.client_of(request, body.user)
        task = await prepare(body, service, envelope, client)
        outputs = Outputs(service, task.job)
        if body.stream:
            return EventStream(events(task, body, outputs), outputs)
        choices, _ = await unless_gone(request, collect(outputs))
        answer = whole_answer(task, body, choices, outputs.tally)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """A request, ready to run and to be answered."""

    job: Job
    envelope: Envelope
    names: TokenNames
    echoed: list[str] | None  # each prompt's text, if the answer repeats it
    num_top: int | None  # `logprobs`
    gives_prompt_logprobs: bool
    gives_token_ids: bool

    def prompt_of(self, index: int) -> list[int]:
        """The prompt ids of a choice."""
        return self.job.prompts[index // self.job.n]

    def echo_of(self, index: int) -> str:
        """The prompt text a choice repeats."""
        return self.echoed[index // self.job.n] if self.echoed is not None else ""


async def prepare(
    body: CompletionRequest,
    service: Service,
    envelope: Envelope,
    client: Client = Client(),  # noqa: B008 (frozen)
) -> CompletionTask:
    """Validate everything and tokenize. Raises RequestError."""
    refuse_unsupported(body)
    n = num_choices(body, len(body.prompt))
    num_top = capped_logprobs(body.logprobs, service, "logprobs")
    num_prompt = capped_logprobs(body.prompt_logprobs, service, "prompt_logprobs")
    scored = [c for c in (num_prompt, num_top if body.echo else None) if c is not None]
    sampling = await sampling_params(
        body,
        service,
        completion_limit(
            DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            0 if body.echo else 1,
            "max_tokens",
        ),
        LogprobCounts(generated=num_top, prompt=max(scored, default=None)),
    )
    prompts = await asyncio.gather(*(prompt_ids(p, body, service) for p in body.prompt))
    as_ids = bool(body.return_tokens_as_token_ids)
    names = TokenNames(service.engine.tokenizer, as_ids, sampling.skip_special_tokens)
    return CompletionTask(
        job=Job(
            label=envelope.id,
            prompts=prompts,
            sampling=sampling,
            n=n,
            priority=body.priority or 0,
            timeout_s=body.timeout,
            client=client,
            cache_salt=cache_salt(body.cache_salt),
        ),
        envelope=envelope,
        names=names,
        echoed=await _echoed(body, prompts, names) if body.echo else None,
        num_top=num_top,
        gives_prompt_logprobs=body.prompt_logprobs is not None,
        gives_token_ids=bool(body.return_token_ids),
    )


async def _echoed(
    body: CompletionRequest, prompts: list[list[int]], names: TokenNames
) -> list[str]:
    cut = body.truncate_prompt_tokens is not None
    return [
        prompt
        if isinstance(prompt, str) and not cut
        else await names.tokenizer.decode(ids, names.skip_special)
        for prompt, ids in zip(body.prompt, prompts, strict=True)
    ]


def whole_answer(
    task: CompletionTask, body: CompletionRequest, choices: list[Choice], tally: Tally
) -> Completion:
    """The answer without streaming."""
    extras: dict[str, Any] = {"metrics": tally.metrics()} if body.return_metrics else {}
    return Completion(
        **task.envelope.fields(),
        choices=[_answer_choice(task, index, choice) for index, choice in enumerate(choices)],
        usage=tally.usage(),
        **extras,
    )


def _answer_choice(task: CompletionTask, index: int, choice: Choice) -> CompletionChoice:
    extras: dict[str, Any] = {}
    if task.gives_prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, task.names)
    if task.gives_token_ids:
        extras["prompt_token_ids"] = task.prompt_of(index)
        extras["token_ids"] = choice.token_ids
    return CompletionChoice(
        index=index,
        text=task.echo_of(index) + choice.text,
        logprobs=_all_logprobs(task, index, choice),
        finish_reason=choice.ended_by,
        stop_reason=choice.stop_reason,
        **extras,
    )


def _all_logprobs(task: CompletionTask, index: int, choice: Choice) -> CompletionLogprobs | None:
    if task.num_top is None:
        return None
    writer = CompletionLogprobsWriter(task.num_top, task.names, leads=task.echoed is not None)
    parts = []
    if task.echoed is not None:
        parts.append(writer.prompt(task.prompt_of(index), choice.prompt_logprobs))
    parts.append(writer.generated(choice.logprobs))
    return CompletionLogprobs(**joined_logprobs(parts))


async def events(
    task: CompletionTask, body: CompletionRequest, outputs: Outputs
) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    chunks = ChunkWriter(
        task.envelope, body.stream_options, outputs.tally, tells_metrics=bool(body.return_metrics)
    )
    choices = [_ChoiceStream(task, index) for index in range(task.job.num_choices)]
    async for index, output in in_intervals(outputs, body.stream_interval):
        payload = choices[index].payload(output)
        if output.finish_reason is not None:
            yield chunks.last_chunk(index, payload, output.finish_reason, output.stop_reason)
        elif payload:
            yield chunks.chunk(index, payload)
    yield chunks.figures_chunk() + DONE


class _ChoiceStream:
    """Turns one choice's outputs into chunk payloads; the prompt, if echoed, leads the first."""

    def __init__(self, task: CompletionTask, index: int) -> None:
        self._task = task
        self._prompt_ids = task.prompt_of(index)
        self._echo = task.echo_of(index)
        self._begun = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._writer = (
            CompletionLogprobsWriter(task.num_top, task.names, leads=task.echoed is not None)
            if task.num_top is not None
            else None
        )

    def payload(self, output: RequestOutput) -> str:
        """The chunk's fields as JSON text; empty if there is nothing to say yet."""
        self._prompt_logprobs += output.prompt_logprobs or []
        if not output.token_ids and output.finish_reason is None:
            return ""
        begins, self._begun = not self._begun, True
        text = self._echo + output.text if begins else output.text
        task = self._task
        if not (text or output.finish_reason or self._writer or task.gives_token_ids):
            return ""
        logprobs = "null"
        if self._writer is not None:
            logprobs = json.dumps(self._logprobs(self._writer, begins, output))
        extras = ""
        if task.gives_token_ids:
            extras = f',"token_ids":{output.token_ids}'
            if begins:
                extras += f',"prompt_token_ids":{self._prompt_ids}'
        return f'"text":{text_json(text)},"logprobs":{logprobs}{extras}'

    def _logprobs(
        self, writer: CompletionLogprobsWriter, begins: bool, output: RequestOutput
    ) -> dict[str, Any] | None:
        parts = []
        if begins and self._task.echoed is not None:
            parts.append(writer.prompt(self._prompt_ids, self._prompt_logprobs))
        if output.logprobs:
            parts.append(writer.generated(output.logprobs))
        return joined_logprobs(parts) if parts else None
