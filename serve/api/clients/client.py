"""Whose request is this, and what holds for them: for the fair policy, and for the limits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from serve.config import ServerConfig

MAX_NAME_CHARS = 64

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ClientEntry(BaseModel):
    """One client's limits; None is no limit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    weight: _Rate | None = None

    @property
    def limits_anything(self) -> bool:
        """Whether there is any limit to hold a client to."""
        limits = (self.max_concurrent, self.requests_per_minute, self.tokens_per_minute)
        return any(limit is not None for limit in limits)


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


class Clients:
    """Tells clients apart. `named` are those of the limits file, `default` holds for all others."""

    def __init__(
        self, config: ServerConfig, default: ClientEntry, named: Mapping[str, ClientEntry]
    ) -> None:
        self._default = default
        self._named = named
        self._weights = config.client_weights()
        self._has_keys = bool(config.api_key)
        self._by_key = len(config.api_key) > 1

    def of(self, headers: Headers, user: str | None) -> Client:
        """Its share goes by API key where there are several, else by `user`, which clients choose
        themselves; its limits go by key wherever there is one (see `limits_file`).

        A key is known to the engine by its hash alone, and so is a `user` of great length.
        """
        key, user = presented_key(headers), user or ""
        asked = key if self._by_key else user
        name = _hash(asked) if self._by_key or len(asked) > MAX_NAME_CHARS else asked
        weight = self._named.get(asked, self._default).weight
        by_user = self._is_held_by_user(key, user)
        holder = user if by_user else key
        entry, is_named = self._named.get(holder, self._default), holder in self._named
        return Client(
            name=name,
            weight=self._weights.get(asked, 1.0) if weight is None else weight,
            label=entry.name or (_hash(holder) if is_named else "default"),
            limits=entry,
            account=_hash(holder),
            is_known=is_named or not by_user,
        )

    def _is_held_by_user(self, key: str, user: str) -> bool:
        if not self._has_keys:
            return True
        return not self._by_key and user in self._named and key not in self._named


def presented_key(headers: Headers) -> str:
    """The bearer token, or Anthropic's `x-api-key`; empty if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
