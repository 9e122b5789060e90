"""What the routes work with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from serve.api.clients.client import Clients
from serve.api.clients.client_limits import ClientLimits
from serve.api.figures.metrics import Metrics
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.errors import ModelNotFound


class OpenRequest(Protocol):
    """A generation that is not over."""

    def goes_by(self, request_id: str) -> bool:
        """Whether a client means this one."""

    def abort(self) -> None:
        """End it; its reader is told."""


@dataclass(slots=True)
class OpenRequests:
    """The generation requests that are open; changed only by `serve.api.answering.generation`."""

    members: set[OpenRequest] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Service:
    """The engines and the settings, handed to every route. Each engine serves a model; `engine` is
    the first, which answers whoever names none."""

    engines: tuple[AsyncEngine, ...]
    config: ServerConfig
    metrics: Metrics
    clients: Clients
    limits: ClientLimits
    created: int = field(default_factory=lambda: int(time.time()))
    open_requests: OpenRequests = field(default_factory=OpenRequests)

    @property
    def engine(self) -> AsyncEngine:
        """The one that routes without a model ask."""
        return self.engines[0]

    def engine_for(self, model: str | None) -> AsyncEngine:
        """The engine that serves a model by this name. Raises ModelNotFound."""
        for engine in self.engines:
            if model is None or model in engine.model.names:
                return engine
        served = [name for engine in self.engines for name in engine.model.names]
        raise ModelNotFound(
            f"The model {str(model)[:200]!r} is not served here. Served: {', '.join(served)}.",
            param="model",
        )
