"""Collects the plan of one step while the scheduler makes its passes."""

from __future__ import annotations

from serve.kv_cache.block_copy import BlockCopy
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.scheduler.request import Request


class PlanBuilder:
    """What has been put into this step so far, and the token budget that is left."""

    __slots__ = (
        "_budget",
        "admitted",
        "has_prompt",
        "preempted",
        "released",
        "requests",
        "scheduled",
        "swap_in",
        "swap_out",
        "tokens_left",
    )

    def __init__(self, token_budget: int, released: list[str]) -> None:
        self._budget = token_budget
        self.tokens_left = token_budget
        self.scheduled: list[ScheduledRequest] = []
        self.requests: list[Request] = []  # of `scheduled`, entry by entry
        self.admitted: list[RowData] = []
        self.released = released
        self.preempted: list[Request] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.has_prompt = False  # whether a waiting request was begun

    @property
    def num_tokens(self) -> int:
        """Tokens put in so far."""
        return self._budget - self.tokens_left

    def build(self) -> SchedulerOutput:
        """The finished plan."""
        return SchedulerOutput(
            scheduled=self.scheduled,
            admitted=self.admitted,
            released=self.released,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            copy=[],
            num_scheduled_tokens=self.num_tokens,
        )
