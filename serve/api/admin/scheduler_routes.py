"""The routes that look into the scheduler, and the one that changes it while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.errors import NoSuchRequest
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.scheduler import (
    RequestState,
    SchedulerSettings,
    SchedulerState,
)
from serve.api.service import Service
from serve.engine.inspect.chrome_trace import chrome_trace


def scheduler_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["scheduler"], responses=dict(ERROR_RESPONSES))
    engine, max_bytes = service.engine, service.config.max_request_bytes

    @router.get("/v1/scheduler/state", response_model=SchedulerState)
    async def show_state() -> Response:
        return _json(await engine.control("state"))

    # A path parameter, because a client's ids may hold slashes.
    @router.get("/v1/requests/{request_id:path}", response_model=RequestState)
    async def show_request(request_id: str) -> Response:
        choices = await engine.control("requests", request_id=request_id)
        if not choices:
            raise NoSuchRequest(
                f"No request of late goes by the id {request_id[:200]!r}: use a response's id or "
                "the X-Request-Id header that came with it."
            )
        return _json({"id": request_id, "choices": choices})

    @router.get("/v1/scheduler/trace", response_class=Response)
    async def show_trace(format: Literal["jsonl", "chrome"] = "jsonl") -> Response:
        """The last steps and requests; `chrome` is what ui.perfetto.dev opens."""
        lines = await engine.control("trace")
        if format == "chrome":
            text = await asyncio.to_thread(lambda: json.dumps(chrome_trace(lines)))
            return Response(text, media_type="application/json")
        return Response(await asyncio.to_thread(_jsonl, lines), media_type="application/jsonl")

    @router.get("/v1/scheduler/config", response_model=SchedulerSettings)
    async def show_settings() -> Response:
        return _json(await engine.control("settings"))

    @router.post(
        "/v1/scheduler/config",
        response_model=SchedulerSettings,
        openapi_extra=request_body(SchedulerSettings),
    )
    async def change_settings(request: Request) -> Response:
        """Answers what GET answers from then on."""
        body = await read_body(request, SchedulerSettings, max_bytes)
        return _json(await engine.configure(body.model_dump(exclude_unset=True)))

    return router


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


def _jsonl(lines: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)
