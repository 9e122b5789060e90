"""The served OpenAPI document: bodies are parsed by us, so we also describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve.api.protocol.common import ErrorBody

ERROR_RESPONSES: Mapping[int | str, dict[str, Any]] = MappingProxyType(
    {
        status: {"model": ErrorBody, "description": description}
        for status, description in {
            400: "The request is wrong; `param` names the field.",
            401: "The API key is missing or wrong.",
            403: "A web page of another origin, or another host name, that is not allowed.",
            404: "No such model.",
            413: "The body is too large.",
            415: "The body is not JSON.",
            429: "Too much is waiting; see `Retry-After`.",
            500: "The server failed.",
            503: "The engine is not running.",
            504: "The request waited longer than its timeout.",
        }.items()
    }
)


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model` as its body."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def describe_bodies(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Add the bodies' schemas to the document, and drop the 422 that is never sent."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in models],
                ref_template="#/components/schemas/{model}",
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
