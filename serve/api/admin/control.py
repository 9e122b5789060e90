"""`POST /abort_requests` ends open requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.answering.endpoint import json_response
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.control import Aborted, AbortRequest
from serve.api.service import Service


def control_routes(service: Service) -> APIRouter:
    """The route of this file."""
    router = APIRouter(tags=["control"], responses=dict(ERROR_RESPONSES))
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/abort_requests", response_model=Aborted, openapi_extra=request_body(AbortRequest)
    )
    async def abort_requests(request: Request) -> Response:
        body = await read_body(request, AbortRequest, max_bytes)
        return json_response(Aborted(num_aborted=aborted(body.request_ids, service)))

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
