"""`/v1/scheduler/…` and `/v1/requests/{id}`: looking into the scheduler, and changing it."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field, create_model

from serve.api.protocol.common import Finite, RequestModel, ResponseModel
from serve.config import SchedulerConfig

Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]


def _json_type(hint: Any) -> Any:
    """A setting's type as a request spells it; null leaves it as it is."""
    (kind,) = {*get_args(hint)} - {NoneType} if NoneType in get_args(hint) else (hint,)
    whole = isinstance(kind, type) and issubclass(kind, int) and kind is not bool
    return (Count if whole else Finite if kind is float else kind) | None


_TYPES = get_type_hints(SchedulerConfig)

SchedulerSettings = create_model(
    "SchedulerSettings",
    __base__=RequestModel,
    __doc__="""The settings that may change while the server runs, by their flags' names.

    An answer has them all. A change has some, which hold from the next step on; the others stay as
    they are. The engine knows the bounds of each, and refuses whatever is none of these.
    """,
    **{  # type: ignore[call-overload]
        setting.name: (_json_type(_TYPES[setting.name]), None)
        for setting in fields(SchedulerConfig)
        if "limit" in setting.metadata and setting.metadata["limit"].is_live
    },
)


class SchedulerState(ResponseModel):
    """Settings, queues, pools, and the requests in each place (the first of them)."""

    model_config = ConfigDict(extra="allow")

    settings: dict[str, Any]
    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_blocks_used: int


class ChoiceState(ResponseModel):
    """One choice: the same fields in every state. Times end in `_at` and are ISO 8601 in UTC; null
    is what has not happened, or what only a queued request has."""

    id: str
    status: Literal["waiting", "preempted", "swapped", "running", "finished"]
    reason: str | None
    """Why it waits."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition", "timeout"] | None
    """How it ended."""
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    age_s: float
    """Since it arrived, and no longer growing when it has ended."""
    arrived_at: str
    started_at: str | None
    first_token_at: str | None
    finished_at: str | None
    num_ahead: int | None
    num_blocks_needed: int | None
    """KV blocks for its own tokens."""
    num_blocks_kept_free: int | None
    """Blocks that must be left over beside these, for the requests that run."""
    num_blocks_free: int | None
    estimated_start_s: float | None
    """At the rate at which the queue has moved of late; null while that is not known."""


class RequestState(ResponseModel):
    """What becomes of a request: one entry per choice."""

    id: str
    choices: list[ChoiceState]
