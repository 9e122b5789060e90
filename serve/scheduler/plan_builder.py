"""Collects the plan of one step while the scheduler makes its passes."""

from __future__ import annotations

from serve.kv_cache.block_copy import BlockCopy
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.scheduler.request import Request


class PlanBuilder:
    """What has been put into this step so far, and the token budget that is left.

    `number` counts launched steps from 1.
    """

    __slots__ = (
        "_budget",
        "admitted",
        "has_prompt",
        "number",
        "preempted",
        "released",
        "requests",
        "scheduled",
        "swap_in",
        "swap_out",
        "tokens_left",
    )

    def __init__(self, number: int, token_budget: int, released: list[str]) -> None:
        self.number = number
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

    def place(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Put in a request's next tokens; they count as computed from here on."""
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens and end < request.max_num_tokens
        self.scheduled.append(
            ScheduledRequest(
                request.request_id,
                start,
                num_tokens,
                request.token_ids[start:end],
                new_block_ids,
                samples,
            )
        )
        self.requests.append(request)
        self.tokens_left -= num_tokens
        request.num_computed_tokens = end
        request.last_step = self.number
        if samples:
            request.num_tokens += 1

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
