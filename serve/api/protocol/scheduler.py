"""`/v1/scheduler/…` and `/v1/requests/{id}`: looking into the scheduler, and changing it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from serve.api.protocol.common import Finite, RequestModel, ResponseModel

Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SchedulerSettings(RequestModel):
    """The settings that may change while the server runs, by their flags' names.

    An answer has them all. A change has some, which hold from the next step on; the others stay as
    they are. The engine knows the bounds of each, and refuses whatever is none of these.
    """

    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    target_itl_ms: Finite | None = None
    preemption_mode: Literal["recompute", "swap", "auto"] | None = None
    preemption_victim: (
        Literal["last-admitted", "least-progress", "most-blocks", "cheapest"] | None
    ) = None
    thrash_guard: bool | None = None
    fair_prefill: bool | None = None
    scheduling_policy: Literal["fcfs", "priority", "fair"] | None = None
    priority_aging_time: Finite | None = None
    step_order: Literal["decode-first", "prefill-first"] | None = None
    scheduler_delay_factor: Finite | None = None
    long_prefill_token_threshold: Count | None = None
    max_num_partial_prefills: Count | None = None
    max_long_partial_prefills: Count | None = None
    max_num_queued_reqs: Count | None = None
    max_num_queued_tokens: Count | None = None


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
