"""API keys: every route needs one, except those that tell nothing and cost nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.errors import Unauthorized, error_response

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


class ApiKeyGuard:
    """ASGI middleware that answers 401 unless the request carries one of the keys.

    What is open is named, what is closed is not: a route added tomorrow, an alias or a misspelt
    path is closed. CORS preflights are answered by the CORS middleware around this one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if (
            scope["type"] == "lifespan"
            or scope["path"] in self._open_paths
            or self._is_known(presented_key(Headers(scope=scope)))
        ):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("Send a valid API key: 'Authorization: Bearer KEY'.")
        await error_response(error)(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        digest = _digest(key.encode("latin-1"))  # the bytes that were sent
        # Every key is compared, and digests have one length: time tells nothing about the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def presented_key(headers: Headers) -> str:
    """The bearer token, or Anthropic's `x-api-key`; empty if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
