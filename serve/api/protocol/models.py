"""`GET /v1/models` and the small answers of the system routes."""

from __future__ import annotations

from typing import Literal

from serve.api.protocol.common import ResponseModel


class ModelCard(ResponseModel):
    """One name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "serve-llm"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(ResponseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(ResponseModel):
    """The server's version."""

    version: str


class Health(ResponseModel):
    """Alive. While the engine process is started again, requests wait for it."""

    status: Literal["ok", "restarting"]


class Load(ResponseModel):
    """Generation requests that are open now (vLLM's name)."""

    server_load: int
