"""API keys: every route needs one, except those that tell nothing and cost nothing.

Where there are admin keys, routes that control the server need one of these.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.clients.client import presented_key
from serve.api.clients.origins import HARMLESS_METHODS
from serve.api.errors import NeedsAdmin, Unauthorized, error_response
from serve.errors import RequestError

OPEN_PATHS = frozenset(
    {
        "/health",
        "/ready",
        "/ping",
        "/version",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
    }
)


ADMIN_PATHS = ("/v1/prefix_cache/", "/reset_prefix_cache", "/abort_requests")
"""Routes that change what the server does for everybody, whatever the method."""
ADMIN_WRITES = ("/v1/scheduler/",)
"""Routes that anybody may read, and only an admin may change."""


class KnownKeys:
    """Keys by which one of them is recognized; what they are is not kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        digest = _digest(key.encode("latin-1"))  # the bytes that were sent
        # Every key is compared, and digests have one length: time tells nothing about the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless the request carries one of the keys, and 403 if it
    is not one for this route. Without `keys` only what controls the server is closed.

    What is open is named, what is closed is not: a route added tomorrow, an alias or a misspelt
    path is closed. CORS preflights are answered by the CORS middleware around this one.
    """

    def __init__(
        self, app: ASGIApp, keys: KnownKeys, admin_keys: KnownKeys, open_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        error = None if scope["type"] == "lifespan" else self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        if scope["path"] in self._open_paths:
            return None
        key = presented_key(Headers(scope=scope))
        if key in self._admin_keys:
            return None
        is_known = key in self._keys
        if self._admin_keys and controls_the_server(scope):
            if is_known:
                return NeedsAdmin("This route needs an admin API key (--admin-api-key).")
            return Unauthorized("Send an admin API key: 'Authorization: Bearer KEY'.")
        if is_known or not self._keys:
            return None
        return Unauthorized("Send a valid API key: 'Authorization: Bearer KEY'.")


def controls_the_server(scope: Scope) -> bool:
    """Whether a request is of those that an admin key is for."""
    path: str = scope["path"]
    reads = scope.get("method") in HARMLESS_METHODS
    return path.startswith(ADMIN_PATHS) or (path.startswith(ADMIN_WRITES) and not reads)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
