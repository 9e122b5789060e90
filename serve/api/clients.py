"""Whose request is this, for the fair policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

from serve.api.auth import presented_key
from serve.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Client:
    """`name` tells clients apart; `weight` is this one's share relative to others."""

    name: str = ""
    weight: float = 1.0


def client_of(request: Request, user: str | None, config: ServerConfig) -> Client:
    """By API key where there are several; else by `user`, which clients choose themselves.

    A key is known to the engine by its hash alone.
    """
    by_key = len(config.api_key) > 1
    asked = presented_key(request.headers) if by_key else user or ""
    weight = config.weight_of(asked)
    return Client(hashlib.sha256(asked.encode()).hexdigest()[:16] if by_key else asked, weight)
