"""The routes about the server itself: alive, version, models, figures."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from serve import __version__
from serve.api.openapi import ERROR_RESPONSES
from serve.api.protocol.models import Health, Load, ModelCard, ModelList, Version
from serve.api.service import Service
from serve.errors import EngineRestarting, ShuttingDown


def system_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["system"], responses={503: ERROR_RESPONSES[503]})

    @router.get("/health")
    async def health() -> Health:
        return _health(service)

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Health:
        return _health(service)

    @router.get("/ready")
    async def ready() -> Health:
        health = _health(service)
        if service.engine.is_leaving:
            raise ShuttingDown("The server is about to stop.")
        if health.status != "ok":
            raise EngineRestarting("The engine is being started again.")
        return health

    @router.get("/version")
    async def version() -> Version:
        return Version(version=__version__)

    @router.get("/load")
    async def load() -> Load:
        return Load(server_load=service.open_requests.count)

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[_card(service, n) for e in service.engines for n in e.model.names])

    # A path parameter, because names may hold slashes.
    @router.get(
        "/v1/models/{name:path}", response_model=ModelCard, responses={404: ERROR_RESPONSES[404]}
    )
    async def show_model(name: str) -> ModelCard:
        return _card(service, name)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=service.metrics.content_type)

    return router


def _health(service: Service) -> Health:
    """Alive while requests that come now will be answered. Raises EngineDead, EngineSilent."""
    for engine in service.engines:
        engine.check_health()
    restarting = any(engine.is_restarting for engine in service.engines)
    return Health(status="restarting" if restarting else "ok")


def _card(service: Service, name: str) -> ModelCard:
    model = service.engine_for(name).model
    return ModelCard(
        id=name, created=service.created, root=model.names[0], max_model_len=model.max_model_len
    )
