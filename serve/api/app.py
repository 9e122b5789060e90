"""The web application: routes, error answers and what stands around them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from serve import __version__
from serve.api.admin.control import control_routes
from serve.api.admin.prefix_cache import prefix_cache_routes
from serve.api.admin.scheduler_routes import scheduler_routes
from serve.api.admin.system import system_routes
from serve.api.admin.tokenize import tokenize_routes
from serve.api.anthropic.errors import AnthropicErrors
from serve.api.anthropic.messages import anthropic_routes
from serve.api.clients.auth import OPEN_PATHS, ApiKeyGuard, KnownKeys
from serve.api.clients.client_limits import ClientLimits
from serve.api.clients.limits_file import known_clients
from serve.api.clients.origins import HostGuard, OriginGuard, allowed_hosts
from serve.api.errors import install_error_handlers
from serve.api.figures.metrics import Metrics
from serve.api.middleware import Innermost, RequestIds
from serve.api.openai.chat import chat_routes
from serve.api.openai.completions import completion_routes
from serve.api.openai.responses import responses_routes
from serve.api.openapi import describe_bodies
from serve.api.protocol.anthropic import CountTokensRequest, MessagesRequest
from serve.api.protocol.chat import ChatCompletionRequest
from serve.api.protocol.completions import CompletionRequest
from serve.api.protocol.control import AbortRequest
from serve.api.protocol.prefix_cache import PinRequest
from serve.api.protocol.responses import ResponsesRequest
from serve.api.protocol.scheduler import SchedulerSettings
from serve.api.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from serve.api.service import Service
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine

ROUTES = (
    chat_routes,
    completion_routes,
    responses_routes,
    anthropic_routes,
    tokenize_routes,
    control_routes,
    scheduler_routes,
    prefix_cache_routes,
    system_routes,
)
BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
    SchedulerSettings,
    PinRequest,
)


def create_app(
    engine: AsyncEngine, config: ServerConfig, metrics: Metrics, *others: AsyncEngine
) -> FastAPI:
    """The application over a started engine, and over `others` for further models. Starting,
    draining and closing them is the caller's."""
    app = FastAPI(title="serve-llm", version=__version__, redirect_slashes=False)
    limits = ClientLimits(metrics.client_refused)
    service = Service((engine, *others), config, metrics, known_clients(config), limits)
    for routes in ROUTES:
        app.include_router(routes(service))
    describe_bodies(app, BODIES)
    install_error_handlers(app)
    _surround(app, config)
    return app


def _surround(app: FastAPI, config: ServerConfig) -> None:
    """Middleware, innermost first: a preflight meets CORS before it meets the guards."""
    app.add_middleware(Innermost)
    if config.api_key or config.admin_api_key:
        open_paths = OPEN_PATHS | {"/metrics"} if config.public_metrics else OPEN_PATHS
        keys, admin_keys = KnownKeys(config.api_key), KnownKeys(config.admin_api_key)
        app.add_middleware(ApiKeyGuard, keys=keys, admin_keys=admin_keys, open_paths=open_paths)
    app.add_middleware(OriginGuard, allowed=config.allowed_origins)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    hosts = allowed_hosts(config)
    if hosts is not None:
        app.add_middleware(HostGuard, allowed=hosts)
    app.add_middleware(AnthropicErrors)  # around whatever may refuse
    app.add_middleware(RequestIds)
