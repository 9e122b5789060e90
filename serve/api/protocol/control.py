"""`POST /abort_requests` and the render routes: what a request would become, and how to end one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from serve.api.protocol.bounds import MAX_REQUEST_IDS, Listed, Name
from serve.api.protocol.common import RequestModel, ResponseModel


class AbortRequest(RequestModel):
    """Ids of answers, or the ids that their requests brought."""

    request_ids: Annotated[Listed[Name], Field(min_length=1, max_length=MAX_REQUEST_IDS)]


class Aborted(ResponseModel):
    """How many open requests were ended; unknown ids are none."""

    num_aborted: int


class RenderedRequest(ResponseModel):
    """What the engine would be given for one prompt; n choices are n of these."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt_text: str | None = None  # on request: `return_prompt_text`
    sampling_params: dict[str, Any]
    priority: int
    cache_salt: str | None
