"""The routes about the server itself: alive, version, models, figures."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from serve import __version__
from serve.api.openapi import ERROR_RESPONSES
from serve.api.protocol.models import Load, ModelCard, ModelList, Version
from serve.api.service import Service
from serve.errors import EngineDead


def system_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["system"], responses={503: ERROR_RESPONSES[503]})

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        return _alive(service)

    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def ping() -> Response:
        return _alive(service)

    @router.get("/version")
    async def version() -> Version:
        return Version(version=__version__)

    @router.get("/load")
    async def load() -> Load:
        return Load(server_load=service.open_requests.count)

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[_card(service, name) for name in service.engine.model.names])

    # A path parameter, because names may hold slashes.
    @router.get(
        "/v1/models/{name:path}", response_model=ModelCard, responses={404: ERROR_RESPONSES[404]}
    )
    async def show_model(name: str) -> ModelCard:
        return _card(service, service.served_name(name))

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=service.metrics.content_type)

    return router


def _alive(service: Service) -> Response:
    reason = service.engine.dead_reason
    if reason is not None:
        raise EngineDead(f"The engine has ended: {reason}")
    return Response(status_code=200)


def _card(service: Service, name: str) -> ModelCard:
    model = service.engine.model
    return ModelCard(
        id=name, created=service.created, root=model.names[0], max_model_len=model.max_model_len
    )
