"""Whose request is this: for the fair policy, and for the clients' limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

from serve.api.auth import presented_key
from serve.api.limits_file import ClientEntry, LimitsFile
from serve.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Client:
    """`name` tells clients apart; `weight` is this one's share relative to others; `label` is what
    messages and metrics call it, the same for all that the limits file does not name."""

    name: str = ""
    weight: float = 1.0
    label: str = "default"
    limits: ClientEntry = ClientEntry()  # noqa: RUF009 (frozen)


def client_of(
    request: Request, user: str | None, config: ServerConfig, limits: LimitsFile
) -> Client:
    """By API key where there are several; else by `user`, which clients choose themselves.

    A key is known to the engine by its hash alone.
    """
    by_key = len(config.api_key) > 1
    asked = presented_key(request.headers) if by_key else user or ""
    name = hashlib.sha256(asked.encode()).hexdigest()[:16] if by_key else asked
    entry = limits.entry_of(asked)
    weight = config.weight_of(asked) if entry.weight is None else entry.weight
    label = entry.name or (name if asked in limits.clients else "default")
    return Client(name, weight, label, entry)
