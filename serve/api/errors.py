"""What each exception looks like to an HTTP client: one table, one body shape (OpenAI's).

Answers stay small whatever was sent: messages and field paths are cut to a fixed length, and the
offending input is never repeated.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve.api.protocol.common import ErrorBody, ErrorInfo
from serve.errors import (
    DeadlinePassed,
    EngineDead,
    EngineError,
    EngineRestarting,
    EngineSilent,
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    QueuedTooLong,
    QueueFull,
    RateLimited,
    RequestAborted,
    RequestError,
    ShuttingDown,
    StepFailed,
)

MAX_MESSAGE_CHARS = 2000
MAX_PATH_PART_CHARS = 64
RESTART_TIME_S = 10  # what a supervisor may need to start the server again

logger = logging.getLogger(__name__)


class Unsupported(InvalidRequest):
    """The field is known, but this server cannot do what it asks."""


class MissingField(InvalidRequest):
    """A required field is absent."""


class InvalidJson(RequestError):
    """The body is not JSON."""


class NoSuchRoute(RequestError):
    """Nothing is served at this path."""


class NotStored(RequestError):
    """No stored response has this id."""


class NoSuchItem(RequestError):
    """No stored conversation has an item of this id."""


class NoSuchRequest(RequestError):
    """No request that runs, waits or ended of late has this id."""


class NoSuchPin(RequestError):
    """Nothing is pinned under this id."""


class WrongMethod(RequestError):
    """The path exists, but not for this method."""


class Unauthorized(RequestError):
    """The API key is missing or wrong."""


class NeedsAdmin(RequestError):
    """The key is good, but not for a route that controls the server."""


class ForeignOrigin(RequestError):
    """A web page of another origin, which may not use the server."""


class ForeignHost(RequestError):
    """The request was sent to a name that is not the server's."""


class BodyTooLarge(RequestError):
    """The request body exceeds the server's limit."""


class UnsupportedMediaType(RequestError):
    """The body is announced as something that is not JSON."""


class ClientGone(RequestError):
    """The client hung up; nobody reads the answer to this."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Status, `type` and `code` of one class of errors."""

    status: int
    type: str
    code: str


_INVALID, _SERVER = "invalid_request_error", "server_error"

ERROR_KINDS: Mapping[type[Exception], ErrorKind] = MappingProxyType(
    {
        InvalidRequest: ErrorKind(400, _INVALID, "invalid_value"),
        Unsupported: ErrorKind(400, _INVALID, "unsupported_value"),
        MissingField: ErrorKind(400, _INVALID, "missing_required_parameter"),
        InvalidJson: ErrorKind(400, _INVALID, "invalid_json"),
        PromptTooLong: ErrorKind(400, _INVALID, "context_length_exceeded"),
        Unauthorized: ErrorKind(401, "authentication_error", "invalid_api_key"),
        NeedsAdmin: ErrorKind(403, "permission_error", "admin_key_required"),
        ForeignOrigin: ErrorKind(403, "permission_error", "origin_not_allowed"),
        ForeignHost: ErrorKind(403, "permission_error", "host_not_allowed"),
        ModelNotFound: ErrorKind(404, _INVALID, "model_not_found"),
        NoSuchRoute: ErrorKind(404, _INVALID, "unknown_url"),
        NotStored: ErrorKind(404, _INVALID, "response_not_found"),
        NoSuchItem: ErrorKind(404, _INVALID, "item_not_found"),
        NoSuchRequest: ErrorKind(404, _INVALID, "request_not_found"),
        NoSuchPin: ErrorKind(404, _INVALID, "pin_not_found"),
        WrongMethod: ErrorKind(405, _INVALID, "method_not_allowed"),
        BodyTooLarge: ErrorKind(413, _INVALID, "request_too_large"),
        UnsupportedMediaType: ErrorKind(415, _INVALID, "unsupported_media_type"),
        QueueFull: ErrorKind(429, "rate_limit_error", "queue_full"),
        RateLimited: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded"),
        QueuedTooLong: ErrorKind(503, _SERVER, "queue_timeout"),
        DeadlinePassed: ErrorKind(504, "timeout_error", "timeout"),
        ClientGone: ErrorKind(499, _INVALID, "client_closed_request"),
        RequestAborted: ErrorKind(499, _INVALID, "request_aborted"),
        RequestError: ErrorKind(400, _INVALID, "bad_request"),
        StepFailed: ErrorKind(500, _SERVER, "step_failed"),
        EngineDead: ErrorKind(503, _SERVER, "engine_dead"),
        EngineRestarting: ErrorKind(503, _SERVER, "engine_restarting"),
        ShuttingDown: ErrorKind(503, _SERVER, "shutting_down"),
        EngineSilent: ErrorKind(503, _SERVER, "engine_not_responding"),
        EngineError: ErrorKind(500, _SERVER, "engine_error"),
        Exception: ErrorKind(500, _SERVER, "internal_error"),
    }
)


def error_kind(error: Exception) -> ErrorKind:
    """The table's entry for the error's class, or its nearest ancestor's."""
    for cls in type(error).__mro__:
        if cls in ERROR_KINDS:
            return ERROR_KINDS[cls]
    raise AssertionError(f"{type(error)} is no Exception")


def error_info(error: Exception) -> ErrorInfo:
    """OpenAI's error object. Unforeseen errors keep their text for the log."""
    kind = error_kind(error)
    message = str(error)
    if kind.code == "internal_error":
        message = "Internal error. The server's log has the details."
    return ErrorInfo(
        message=message[:MAX_MESSAGE_CHARS],
        type=kind.type,
        param=error.param if isinstance(error, RequestError) else None,
        code=kind.code,
    )


def error_body(error: Exception) -> str:
    """The JSON of an answer that is nothing but an error."""
    return json.dumps(ErrorBody(error=error_info(error)).model_dump())


def error_headers(error: Exception) -> dict[str, str]:
    """What an error says beside its body."""
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, EngineDead | EngineRestarting | EngineSilent):
        headers["Retry-After"] = str(RESTART_TIME_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: Exception) -> Response:
    """The whole HTTP answer for an error raised before anything was sent."""
    return Response(
        error_body(error),
        status_code=error_kind(error).status,
        headers=error_headers(error),
        media_type="application/json",
    )


def from_validation(error: ValidationError) -> InvalidRequest:
    """The most specific of pydantic's complaints in one sentence."""
    return _refusal(error.errors(include_url=False, include_input=False, include_context=False))


def _refusal(details: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    # Of the members of a union, the one that got furthest is the one that was meant.
    first = max(details, key=lambda detail: field_path(detail["loc"]).count("."))
    path = field_path(first["loc"])
    if first["type"] == "missing":
        return MissingField(f"{path} is required.", param=path)
    problem = first["msg"].removeprefix("Value error, ").rstrip(".")
    return InvalidRequest(f"{path or 'body'}: {problem}.", param=path or None)


@contextmanager
def misfits_refused() -> Iterator[None]:
    """What one API's request becomes in another's words is validated again: complain as usual."""
    try:
        yield
    except ValidationError as error:
        raise from_validation(error) from None


def field_path(location: Sequence[int | str]) -> str:
    """`messages.0.content`: pydantic's location without its union members, each part bounded."""
    return ".".join(str(p)[:MAX_PATH_PART_CHARS] for p in location if not _is_union_member(p))


def _is_union_member(part: int | str) -> bool:
    return isinstance(part, str) and (
        part.removeprefix("constrained-") in ("str", "int", "float", "bool")
        or re.search(r"[\[\]()A-Z]", part) is not None
    )


def install_error_handlers(app: FastAPI) -> None:
    """Every exception of a route becomes the body above; Starlette's own 404 and 405 as well."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        if error.status_code == 405:
            response = error_response(WrongMethod(f"{request.method} is not served at {path}."))
            response.headers.update(error.headers or {})
            return response
        return error_response(NoSuchRoute(f"Nothing is served at {path}."))

    async def on_parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # What comes first says that it is of the query: only bodies have paths.
        details = [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]
        return error_response(_refusal(details))

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(RequestValidationError, on_parameters)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
