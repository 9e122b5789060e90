"""What stands around every route: an id on each answer, HEAD wherever GET is, and an answer even to
what nobody foresaw. Guards that refuse somebody are in `clients/`."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.errors import error_response

DIRECT_SEND = "serve_llm.direct_send"
"""Scope key: the server's own `send`, past all middleware, which looks at an answer's head alone.
A stream sends a body event per token, and would pay for every layer each time."""
_USABLE = re.compile(r"[!-~]{1,128}")

logger = logging.getLogger(__name__)


class RequestIds:
    """Outermost. `X-Request-Id` (Anthropic: `request-id`) of every answer: the client's if usable,
    else fresh. It is a label for people and logs: the engine makes its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Choose the id and put it on the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if _USABLE.fullmatch(offered) else uuid.uuid4().hex
        scope["request_id"] = request_id
        names = (b"x-request-id", b"request-id")
        headers = [(name, request_id.encode("ascii")) for name in names]
        scope[DIRECT_SEND] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """The id that `RequestIds` chose."""
    return str(request.scope["request_id"])


class Innermost:
    """Shows HEAD to the routes as GET, since load balancers ask so and HTTP says so (the server
    drops the body), and answers 500 if a route raises before it has begun to answer: within all
    other middleware, so that this answer has the headers that every answer has (Starlette's own
    handler stands outside)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer it if need be."""
        asked = scope.get("method")
        if asked == "HEAD":
            scope = {**scope, "method": "GET"}
        begun = False

        def watch(message: Message) -> Awaitable[None]:
            nonlocal begun
            begun = True
            return send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", asked, scope["path"])
            await error_response(error)(scope, receive, send)
