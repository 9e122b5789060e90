"""The routes of `/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from serve.api.answering.body import read_body
from serve.api.errors import Unsupported
from serve.api.openai.responses_work import Responses
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.bounds import Name
from serve.api.protocol.responses import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ItemOrder,
    ResponsesAnswer,
    ResponsesRequest,
)
from serve.api.service import Service
from serve.errors import InvalidRequest


def responses_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["responses"], responses=dict(ERROR_RESPONSES))
    responses = Responses(service)

    @router.post(
        "/v1/responses",
        response_model=ResponsesAnswer,
        openapi_extra=request_body(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        return await responses.create(request)

    @router.post("/v1/responses/input_tokens", openapi_extra=request_body(ResponsesRequest))
    async def count_input_tokens(request: Request) -> InputTokens:
        """How many tokens the same request would have as its input."""
        body = await read_body(request, ResponsesRequest, service.config.max_request_bytes)
        return InputTokens(input_tokens=await responses.num_input_tokens(body))

    @router.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> None:
        raise Unsupported(
            "Compacting a conversation (/v1/responses/compact) is not supported. Send truncation: "
            "'auto' to drop its oldest items when it is too long."
        )

    # No response is called so: these two are not for the routes below.
    for name in ("input_tokens", "compact"):
        router.add_api_route(
            f"/v1/responses/{name}", _only_post, methods=["GET", "DELETE"], include_in_schema=False
        )

    @router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer)
    async def get_response(
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    ) -> Response:
        """A kept answer; with `stream` as the events it was streamed as."""
        if stream:
            events = responses.replayed(response_id, starting_after)
            return StreamingResponse(events, media_type="text/event-stream")
        if starting_after is not None:
            raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
        return Response(responses.find(response_id).answer, media_type="application/json")

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        order: ItemOrder = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Name | None = None,
    ) -> InputItems:
        """What a kept answer was given, the instructions apart, newest first unless `order` says
        otherwise; the next page begins `after` the last item of this one."""
        return responses.input_items(response_id, order, limit, after)

    @router.post("/v1/responses/{response_id}/cancel", response_model=ResponsesAnswer)
    async def cancel_response(response_id: str) -> Response:
        return Response(await responses.cancel(response_id), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> DeletedResponse:
        await responses.delete(response_id)
        return DeletedResponse(id=response_id)

    return router


async def _only_post() -> None:
    raise HTTPException(405, headers={"Allow": "POST"})
