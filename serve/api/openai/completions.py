"""`POST /v1/completions`: a prompt, or several, continued as plain text."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.chunks import Envelope
from serve.api.answering.convert import (
    LogprobCounts,
    cache_salt,
    capped_logprobs,
    completion_limit,
    num_choices,
    prompt_ids,
    refuse_unsupported,
    sampling_params,
)
from serve.api.answering.endpoint import Endpoint
from serve.api.answering.generation import Job
from serve.api.answering.logprobs import TokenNames
from serve.api.clients.client import Client
from serve.api.openai.completion_answer import CompletionAnswer
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.completions import Completion, CompletionRequest
from serve.api.protocol.control import RenderedRequest
from serve.api.service import Service
from serve.engine.public_ids import COMPLETION

DEFAULT_MAX_TOKENS = 16


def completion_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["generation"], responses=dict(ERROR_RESPONSES))
    body = request_body(CompletionRequest)
    completion = Endpoint(
        CompletionRequest, COMPLETION, "text_completion", "text_completion", prepare
    )

    @router.post("/v1/completions", response_model=Completion, openapi_extra=body)
    async def create_completion(request: Request) -> Response:
        return await completion.answered(request, service)

    @router.post("/v1/completions/render", response_model=list[RenderedRequest], openapi_extra=body)
    async def render_completion(request: Request) -> Response:
        rendered = await completion.rendered(request, service)
        items = ",".join(each.model_dump_json(exclude_unset=True) for each in rendered)
        return Response(f"[{items}]", media_type="application/json")

    return router


async def prepare(
    body: CompletionRequest, service: Service, envelope: Envelope, client: Client
) -> CompletionAnswer:
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
    prompts = await prompt_ids(body.prompt, body, service)
    as_ids = bool(body.return_tokens_as_token_ids)
    names = TokenNames(service.engine.tokenizer, as_ids, sampling.skip_special_tokens)
    return CompletionAnswer(
        body=body,
        job=Job(
            label=envelope.id,
            prompts=prompts,
            sampling=sampling,
            n=n,
            gathers=not body.stream,
            priority=body.priority or 0,
            timeout_s=body.timeout,
            client=client,
            cache_salt=cache_salt(body.cache_salt),
        ),
        envelope=envelope,
        names=names,
        echoed=await _echoed(body, prompts, names) if body.echo else None,
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
