"""What the routes work with."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from serve.api.clients.client import Client, client_of
from serve.api.clients.client_limits import ClientLimits
from serve.api.clients.limits_file import LimitsFile
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
    """The engine and the settings, handed to every route."""

    engine: AsyncEngine
    config: ServerConfig
    metrics: Metrics
    limits_file: LimitsFile
    limits: ClientLimits
    created: int = field(default_factory=lambda: int(time.time()))
    open_requests: OpenRequests = field(default_factory=OpenRequests)

    def client_of(self, request: Request, user: str | None) -> Client:
        """Whose request it is."""
        return client_of(request, user, self.config, self.limits_file)

    def served_name(self, asked: str | None) -> str:
        """The name to answer under. Raises ModelNotFound; None means the first served name."""
        names = self.engine.model.names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ModelNotFound(
                f"The model {asked[:200]!r} is not served here. Served: {', '.join(names)}.",
                param="model",
            )
        return asked

    def fingerprint(self) -> str:
        """Changes whenever a setting changes that may change what a seed produces."""
        defaults = sorted(self.engine.model.generation_defaults.items())
        parts = f"{self.engine.ready.identity}\0{defaults}"
        return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:10]
