"""`X-Request-Id` (Anthropic: `request-id`) of every answer: the client's if usable, else fresh."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DIRECT_SEND = "serve_llm.direct_send"
"""Scope key: the server's own `send`, past all middleware, which looks at an answer's head alone.
A stream sends a body event per token, and would pay for every layer each time."""
_USABLE = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """ASGI middleware. The id is a label for people and logs: the engine makes its own."""

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
