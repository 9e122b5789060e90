"""`POST /v1/completions`: a prompt, or several, continued as plain text."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.convert import Limit, LogprobWish, prompt_ids, wishes
from serve.api.answering.endpoint import Call, Endpoint, openai_caller, rendered
from serve.api.answering.logprobs import TokenNames
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
        CompletionRequest,
        "text_completion",
        "text_completion",
        openai_caller(COMPLETION),
        prepare,
    )

    @router.post("/v1/completions", response_model=Completion, openapi_extra=body)
    async def create_completion(request: Request) -> Response:
        return await completion.answered(request, service)

    @router.post("/v1/completions/render", response_model=list[RenderedRequest], openapi_extra=body)
    async def render_completion(request: Request) -> Response:
        answers = await rendered(completion, request, service)
        items = ",".join(each.model_dump_json(exclude_unset=True) for each in answers)
        return Response(f"[{items}]", media_type="application/json")

    return router


async def prepare(body: CompletionRequest, call: Call) -> CompletionAnswer:
    """Validate everything and tokenize. Raises RequestError."""
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    limit = Limit("max_tokens", most, least=0 if body.echo else 1)
    scores = LogprobWish("logprobs", body.logprobs, of_prompt=bool(body.echo))
    wish = await wishes(body, call, limit, scores, len(body.prompt))
    prompts = await prompt_ids(body.prompt, body, call.engine)
    return CompletionAnswer(
        body=body,
        job=wish.job(call, prompts),
        envelope=call.envelope,
        names=wish.names,
        echoed=await _echoed(body, prompts, wish.names) if body.echo else None,
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
