"""`/v1/scheduler/…` and `/v1/requests/{id}`: looking into the scheduler, and changing it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from serve.api.protocol.bounds import Name
from serve.api.protocol.common import RequestModel, ResponseModel

Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SchedulerChanges(RequestModel):
    """Settings to change from the next step on, by their flags' names. Others stay as they are.

    The engine knows which may change and within which bounds, and refuses the others.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    preemption_mode: Literal["recompute", "swap", "auto"] | None = None
    preemption_victim: Name | None = None
    thrash_guard: bool | None = None
    scheduling_policy: Name | None = None
    step_order: Name | None = None
    target_itl_ms: float | None = None


class SchedulerSettings(ResponseModel):
    """All settings that may change, as they are now."""

    settings: dict[str, Any]


class SchedulerState(ResponseModel):
    """Limits, queues, pools, and the requests in each place (the first of them)."""

    model_config = ConfigDict(extra="allow")

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_blocks_used: int


class RequestState(ResponseModel):
    """What becomes of a request: one entry per choice."""

    id: str
    choices: list[dict[str, Any]]
