"""A request's body: bytes within the limit, announced as JSON, parsed and validated in one go."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from serve.api.errors import (
    BodyTooLarge,
    ClientGone,
    InvalidJson,
    UnsupportedMediaType,
    from_validation,
)
from serve.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)

MAX_CONTAINERS = 50_000
MAX_FIELDS = 200_000
MAX_VALUES = 2**20
_PIECES = (
    (b"[{", MAX_CONTAINERS, "lists and objects"),
    (b":", MAX_FIELDS, "fields"),
    (b",", MAX_VALUES, "values"),
)
# The closing quote is optional, so that an unclosed text cannot make the search quadratic.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


async def read_body(request: Request, model: type[M], max_bytes: int) -> M:
    """The request's body as `model`. Raises RequestError.

    We parse the bytes ourselves because FastAPI's parsing accepts NaN, fails on deep nesting and
    repeats the input in its errors.
    """
    _check_headers(request)
    raw = await _read(request, max_bytes)
    _check_structure(raw)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            raise InvalidJson(_json_problem(raw, error)) from None
        raise from_validation(error) from None


def _check_headers(request: Request) -> None:
    content_type, _, parameters = request.headers.get("content-type", "").partition(";")
    media_type = content_type.strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(
            "The body must be JSON: send the header 'Content-Type: application/json'."
        )
    charset = parameters.lower().replace(" ", "").replace('"', "").partition("charset=")[2]
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType("The body must be encoded as UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Compressed bodies are not supported: send plain JSON.")


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone("The client hung up while sending its request.") from None
    return b"".join(chunks)


def _check_structure(raw: bytes) -> None:
    """Refuse a body of too many pieces: parsing builds each one while nothing else runs.

    Parsing in a thread would not help, since the parser holds the interpreter lock throughout.
    """
    if _excess(raw) is None:
        return
    what = _excess(_STRING.sub(b"", raw))  # a text may hold as many of these marks as it likes
    if what is not None:
        raise InvalidRequest(f"The body holds more than {what}.")


def _excess(raw: bytes) -> str | None:
    """Of what there are too many, and how many may be; None if all is well."""
    for marks, limit, what in _PIECES:
        if sum(raw.count(mark) for mark in marks) > limit:
            return f"{limit} {what}"
    return None


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than this server accepts ({max_bytes} bytes). "
        "Send less, or raise --max-request-bytes."
    )


def _json_problem(raw: bytes, error: ValidationError) -> str:
    if not raw.strip():
        return "The body is empty; a JSON object is expected."
    reason = error.errors(include_url=False, include_input=False)[0]["msg"]
    return f"The body is not valid JSON: {reason.removeprefix('Invalid JSON: ')[:200]}."
