"""`POST /tokenize` and `/detokenize`: what the model would read, and what ids mean."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.answering.conversation import conversation_ids
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from serve.api.service import Service
from serve.errors import InvalidRequest


def tokenize_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["tokenizer"], responses=dict(ERROR_RESPONSES))
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/tokenize", response_model=TokenizeResponse, openapi_extra=request_body(TokenizeRequest)
    )
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest, max_bytes)
        answer = await tokenized(body, service)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.post(
        "/detokenize",
        response_model=DetokenizeResponse,
        openapi_extra=request_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest, max_bytes)
        engine = service.engine_for(body.model)
        _check_ids(body.tokens, engine.model.vocab_size)
        text = await engine.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))
        answer = DetokenizeResponse(prompt=text)
        return Response(answer.model_dump_json(), media_type="application/json")

    return router


async def tokenized(body: TokenizeRequest, service: Service) -> TokenizeResponse:
    """The ids of a text or a conversation. Raises RequestError."""
    engine = service.engine_for(body.model)
    tokenizer = engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        ids = await conversation_ids(body.messages, body, tokenizer, service.config)
    else:
        assert body.prompt is not None
        adds = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await tokenizer.encode(body.prompt, adds)
    answer = TokenizeResponse(tokens=ids, count=len(ids), max_model_len=engine.model.max_model_len)
    if body.return_token_strs:
        answer.token_strs = await tokenizer.token_texts(ids)
    return answer


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    if (wrong := max(token_ids, default=0)) >= vocab_size:
        param = f"tokens.{token_ids.index(wrong)}"
        raise InvalidRequest(
            f"{param}: {wrong} is not a token id of this model (0 to {vocab_size - 1}).",
            param=param,
        )
