"""Which web pages may use the server through their visitors' browsers.

A page can send requests anywhere: a simple one (a form's, or text without a content type) leaves
the browser without asking, and only the answer is kept from the page. So what changes something,
costs something or looks in is refused to pages of other origins before it is read, and a page that
has its own name point to this machine (DNS rebinding) is refused by that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.api.errors import ForeignHost, ForeignOrigin, error_response
from serve.config import ServerConfig

ANY = "*"
HARMLESS_METHODS = frozenset({"GET", "HEAD"})
CONTROL_PATHS = (
    "/v1/scheduler/",
    "/v1/requests/",
    "/v1/prefix_cache/",
    "/reset_prefix_cache",
    "/abort_requests",
)
"""Routes that look into the server or change it: not even reading them is open to other pages."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class OriginGuard:
    """ASGI middleware that answers 403 to pages of other origins than the server's and `allowed`.

    `*` does not open the control routes: who may use them is named.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.lower().rstrip("/") for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ForeignOrigin | None:
        controls = scope["path"].startswith(CONTROL_PATHS)
        if scope["method"] in HARMLESS_METHODS and not controls:
            return None
        headers = Headers(scope=scope)
        if not comes_from_elsewhere(headers):
            return None
        origin = headers.get("origin", "")
        if origin.lower() in self._allowed or (ANY in self._allowed and not controls):
            return None
        shown = origin[:200] or "another origin"
        name = " by name (* is not enough here)" if ANY in self._allowed else ""
        return ForeignOrigin(
            f"A web page of {shown} may not use {scope['path'][:200]}. If it should, start the "
            f"server with --allowed-origins and the page's origin{name}."
        )


class HostGuard:
    """ASGI middleware that answers 403 to requests for a name that is none of `allowed`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if not host or host_name(host) in self._allowed:  # every browser says where it goes
            await self._app(scope, receive, send)
            return
        error = ForeignHost(
            f"This server is not served under the name {host[:200]!r}. If it should be, start it "
            f"with --allowed-hosts and that name."
        )
        await error_response(error)(scope, receive, send)


def comes_from_elsewhere(headers: Headers) -> bool:
    """Whether a browser sent this for a page that is not the server's own.

    `Sec-Fetch-Site` is the browser's word, which no page can change, and holds behind a proxy that
    changes Host. A link that was followed has no origin, and its answer is shown to the visitor.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site in ("same-origin", "none"):
        return False
    if origin is None:
        return site is not None and headers.get("sec-fetch-mode") != "navigate"
    own = origin.partition("://")[2].lower()
    return not own or own != headers.get("host", "").lower()


def allowed_hosts(config: ServerConfig) -> tuple[str, ...] | None:
    """The names that are answered; None: all."""
    if ANY in config.allowed_hosts:
        return None
    if config.allowed_hosts:
        return config.allowed_hosts
    if config.api_key or not is_loopback(config.host):
        return None
    return (*LOOPBACK_HOSTS, config.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(host: str) -> str:
    """A Host header without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and (not port or port.isdigit()) else host.lower()
