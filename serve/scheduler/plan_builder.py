"""Collects the plan of one step while the scheduler makes its passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from serve.kv_cache.block_copy import BlockCopy
from serve.scheduler.limits import SchedulerLimits, within
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.scheduler.passing import kept_for_begun
from serve.scheduler.request import Request


class PlanBuilder:
    """What has been put into this step so far, and the token budget that is left.

    `number` counts launched steps from 1. A request is partial when this step leaves some of its
    known tokens for later, long when it has more of them than its share of a step.
    """

    __slots__ = (
        "_budget",
        "_num_kept",
        "admitted",
        "begun",
        "has_prompt",
        "limits",
        "max_share",
        "num_long_partial",
        "num_partial",
        "number",
        "preempted",
        "released",
        "requests",
        "scheduled",
        "swap_in",
        "swap_out",
        "tokens_left",
    )

    def __init__(
        self, number: int, limits: SchedulerLimits, released: list[str], budget: int
    ) -> None:
        self.number = number
        self.limits = limits
        self._budget = budget
        self.tokens_left = budget
        self.max_share = limits.max_share
        self.num_partial = 0
        self.num_long_partial = 0
        self.scheduled: list[ScheduledRequest] = []
        self.requests: list[Request] = []  # of `scheduled`, entry by entry
        self.admitted: list[RowData] = []
        self.released = released
        self.preempted: list[Request] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.has_prompt = False  # whether a waiting request was begun
        self.begun: Request | None = None  # a long prompt that others may pass; it is placed last
        self._num_kept = 0  # tokens for it that are not in `tokens_left`

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
        elif end < request.num_tokens:
            self._count_partial(request, 1)

    def keep_for(self, request: Request, room: int) -> None:
        """Keep a long prompt's part of `room` tokens (passing.py) for it until `place_begun`, if it
        does not end in this step, is the first of that kind and could use more."""
        num_lacking = request.num_uncomputed_tokens
        num_kept = min(kept_for_begun(room), self.tokens_left)
        if not self.limits.fair_prefill or self.num_partial:
            return
        if num_kept < self.share_of(num_lacking) < num_lacking:
            self.begun, self._num_kept = request, num_kept
            self.tokens_left -= num_kept
            self._count_partial(request, 1)

    def place_prompt(self, request: Request) -> None:
        """Put in a prompt's next tokens, all there is room for, unless some are kept for it."""
        num_tokens = self.share_of(request.num_uncomputed_tokens)
        if num_tokens and request is not self.begun:
            self.place(request, num_tokens, [])

    def place_begun(self) -> None:
        """Put in the prompt that was kept for last, with all that the others have left."""
        if self.begun is not None:
            self._count_partial(self.begun, -1)
            self.tokens_left += self._num_kept
            self.place(self.begun, self.share_of(self.begun.num_uncomputed_tokens), [])
            self.begun = None

    def place_decodes(self, requests: Sequence[Request], first: int) -> int:
        """Put in the requests from `first` on that lack one token and have a slot for it, up to one
        that is different; returns its index.

        What `place` would do, without a call for each: nearly all of a busy step is this.
        """
        place, note, number = self.scheduled.append, self.requests.append, self.number
        make = tuple.__new__  # half the price of a named tuple's own
        no_blocks: list[int] = []
        last = min(len(requests), first + self.tokens_left)
        index = first
        for request in islice(requests, first, last):
            start = request.num_computed_tokens
            end = start + 1
            if (
                end != request.num_tokens
                or end >= request.max_num_tokens
                or end > request.num_slots
            ):
                break
            known = request.token_ids[start:end]
            share = (request.request_id, start, 1, known, no_blocks, True)
            place(make(ScheduledRequest, share))
            note(request)
            request.num_computed_tokens = end
            request.num_tokens = end + 1
            request.last_step = number
            index += 1
        self.tokens_left -= index - first
        return index

    def share_of(self, num_tokens: int) -> int:
        """How many of so many tokens of a request can go into this step."""
        return min(num_tokens, self.max_share, self.tokens_left)

    def may_start(self, request: Request, num_lacking: int) -> bool:
        """Whether a request may be begun, or brought back, that lacks so many tokens.

        Not when it would be one partial prefill too many; nor, without chunking, when it would be
        partial at all.
        """
        limits = self.limits
        if self.share_of(num_lacking) == num_lacking:
            return True
        if not limits.enable_chunked_prefill:
            return False
        return within(self.num_partial, limits.max_num_partial_prefills) and (
            request.num_tokens <= self.max_share or self.may_start_long()
        )

    def may_start_long(self) -> bool:
        """Whether another long prompt may be partial."""
        return within(self.num_long_partial, self.limits.max_long_partial_prefills)

    def _count_partial(self, request: Request, count: int) -> None:
        self.num_partial += count
        if request.num_tokens > self.max_share:
            self.num_long_partial += count

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
