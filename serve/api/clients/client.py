"""Whose request is this: for the fair policy, and for the clients' limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

from serve.api.clients.auth import presented_key
from serve.api.clients.limits_file import ClientEntry, LimitsFile
from serve.config import ServerConfig

MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Client:
    """`name` and `weight` are its share's, relative to others. `limits` are counted under
    `account`; `label` is what messages and metrics call that, the same for all that the limits file
    does not name. `is_known`: the account is one of the operator's, none that clients made up."""

    name: str = ""
    weight: float = 1.0
    label: str = "default"
    limits: ClientEntry = ClientEntry()  # noqa: RUF009 (frozen)
    account: str = ""
    is_known: bool = True


def client_of(
    request: Request, user: str | None, config: ServerConfig, limits: LimitsFile
) -> Client:
    """Its share goes by API key where there are several, else by `user`, which clients choose
    themselves; its limits go by key wherever there is one (see `limits_file`).

    A key is known to the engine by its hash alone, and so is a `user` of great length.
    """
    key, user = presented_key(request.headers), user or ""
    by_key = len(config.api_key) > 1
    asked = key if by_key else user
    name = _hash(asked) if by_key or len(asked) > MAX_NAME_CHARS else asked
    weight = limits.entry_of(asked).weight
    by_user = not by_key and (
        not config.api_key or (user in limits.clients and key not in limits.clients)
    )
    holder = user if by_user else key
    entry, is_named = limits.entry_of(holder), holder in limits.clients
    return Client(
        name=name,
        weight=config.weight_of(asked) if weight is None else weight,
        label=entry.name or (_hash(holder) if is_named else "default"),
        limits=entry,
        account=_hash(holder),
        is_known=is_named or not by_user,
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
