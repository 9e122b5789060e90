"""Errors in Anthropic's shape: every answer of 400 and more under `/v1/messages`, whose ever."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api.answering.streaming import named_event
from serve.api.errors import error_info, error_kind
from serve.api.protocol.anthropic import AnthropicError, AnthropicErrorInfo
from serve.api.protocol.common import ErrorBody, ErrorInfo

PATH = "/v1/messages"
ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class AnthropicErrors:
    """ASGI middleware around all that may answer, keys and origins included: OpenAI's error bodies
    become Anthropic's. An error's answer is small, so it is held until it is whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is no error, and what is not for Anthropic's clients."""
        if scope["type"] != "http" or not _is_anthropics(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        parts: list[bytes] = []

        async def translate(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = _translated(b"".join(parts), start["status"], scope["request_id"])
                    await send(_with_length(start, len(body)))
                    await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, translate)


def error_event(error: Exception, request_id: str) -> bytes:
    """An error after the status line has gone."""
    answer = _answer(error_info(error), error_kind(error).status, request_id)
    return named_event("error", **answer.model_dump(exclude={"type"}))


def _is_anthropics(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def _translated(body: bytes, status: int, request_id: str) -> bytes:
    try:
        info = ErrorBody.model_validate_json(body).error
    except ValueError:  # not one of ours, such as the answer to a preflight: text
        text = body.decode(errors="replace")
        info = ErrorInfo(message=text, type="", param=None, code=None)
    return _answer(info, status, request_id).model_dump_json().encode()


def _answer(info: ErrorInfo, status: int, request_id: str) -> AnthropicError:
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    path = f"{info.param}: " if info.param and info.param not in info.message else ""
    error = AnthropicErrorInfo(type=kind, message=path + info.message)
    return AnthropicError(error=error, request_id=request_id)


def _with_length(start: Message, length: int) -> Message:
    replaced = (b"content-length", b"content-type")
    kept = [(name, value) for name, value in start["headers"] if name.lower() not in replaced]
    fresh = [(b"content-length", b"%d" % length), (b"content-type", b"application/json")]
    return {**start, "headers": [*kept, *fresh]}
