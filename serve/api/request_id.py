"""`X-Request-Id`: the client's own if it sent a usable one, else a fresh one, on every answer."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        header = (b"x-request-id", request_id.encode("ascii"))

        # No coroutine of its own: a stream passes here once per token.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            return send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """The id that `RequestIds` chose."""
    return str(request.scope["request_id"])
