"""`POST /…/render` shows what a request would become; `POST /abort_requests` ends open ones."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api import chat, completions
from serve.api.body import read_body
from serve.api.chunks import Envelope, new_envelope
from serve.api.generation import Job
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import ChatCompletionRequest
from serve.api.protocol.common import GenerationRequest
from serve.api.protocol.completions import CompletionRequest
from serve.api.protocol.control import Aborted, AbortRequest, RenderedRequest
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.engine.request_limits import resolve_sampling


def control_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["control"], responses=dict(ERROR_RESPONSES))
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/chat/completions/render",
        response_model=RenderedRequest,
        openapi_extra=request_body(ChatCompletionRequest),
    )
    async def render_chat(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, max_bytes)
        envelope = _envelope(service, request, body, "chatcmpl")
        task = await chat.prepare(body, service, envelope)
        (answer,) = await _rendered(task.job, envelope, body, service)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.post(
        "/v1/completions/render",
        response_model=list[RenderedRequest],
        openapi_extra=request_body(CompletionRequest),
    )
    async def render_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, max_bytes)
        envelope = _envelope(service, request, body, "cmpl")
        task = await completions.prepare(body, service, envelope)
        answers = await _rendered(task.job, envelope, body, service)
        items = ",".join(answer.model_dump_json(exclude_unset=True) for answer in answers)
        return Response(f"[{items}]", media_type="application/json")

    @router.post(
        "/abort_requests", response_model=Aborted, openapi_extra=request_body(AbortRequest)
    )
    async def abort_requests(request: Request) -> Response:
        body = await read_body(request, AbortRequest, max_bytes)
        answer = Aborted(num_aborted=aborted(body.request_ids, service))
        return Response(answer.model_dump_json(), media_type="application/json")

    return router


def aborted(request_ids: list[str], service: Service) -> int:
    """End the open requests that go by these ids; how many there were."""
    meant = [
        each
        for each in service.open_requests.members
        if any(each.goes_by(request_id) for request_id in request_ids)
    ]
    for each in meant:
        each.abort()
    return len(meant)


def _envelope(service: Service, request: Request, body: GenerationRequest, prefix: str) -> Envelope:
    label = body.request_id or request_id_of(request)
    return new_envelope(service, body.model, "rendered", f"{prefix}-{label}")


async def _rendered(
    job: Job, envelope: Envelope, body: GenerationRequest, service: Service
) -> list[RenderedRequest]:
    """One per prompt. Raises what generating would be refused with."""
    engine = service.engine
    answers = []
    for prompt in job.prompts:
        sampling = resolve_sampling(prompt, job.sampling, engine.model, engine.ready)
        answer = RenderedRequest(
            request_id=envelope.id,
            model=envelope.model,
            token_ids=prompt,
            sampling_params=asdict(sampling),
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        if body.return_prompt_text:
            answer.prompt_text = await engine.tokenizer.decode(prompt, False)
        answers.append(answer)
    return answers
