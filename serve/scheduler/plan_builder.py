"""A step's plan: collected while the scheduler makes its passes, then out until it comes back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from serve.kv_cache.block_copy import BlockCopy
from serve.scheduler.limits import SchedulerLimits, within
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.scheduler.policy.passing import kept_for_begun
from serve.scheduler.request import Request, advance_decodes


class PlanBuilder:
    """What has been put into this step so far, and the token budget that is left.

    `number` counts launched steps from 1. A request is partial when this step leaves some of its
    known tokens for later, long when it has more of them than its share of a step. Assigned only
    in this file.
    """

    __slots__ = (
        "_any_started",
        "_budget",
        "_num_kept",
        "admitted",
        "begun",
        "limits",
        "max_share",
        "num_drafts",
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
        self.num_drafts = 0
        self.preempted: list[Request] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self._any_started = False  # whether a waiting request was begun
        self.begun: Request | None = None  # a long prompt that others may pass; it is placed last
        self._num_kept = 0  # tokens for it that are not in `tokens_left`

    @property
    def num_tokens(self) -> int:
        """Tokens put in so far."""
        return self._budget - self.tokens_left

    @property
    def has_prompt(self) -> bool:
        """Whether this is more than decodes and requests brought back."""
        return self._any_started or self.num_tokens > len(self.scheduled)

    def admit(self, row: RowData, *, is_new: bool) -> None:
        """Put in a row for a request that has its blocks: a new one, or one brought back."""
        self.admitted.append(row)
        self._any_started = self._any_started or is_new

    def bring_back(self, copies: list[BlockCopy]) -> None:
        """Put in the host → device copies of a request that was swapped out."""
        self.swap_in += copies

    def preempt(self, victim: Request, copies: Sequence[BlockCopy] = ()) -> None:
        """Take a victim's row; `copies` save its KV to the host."""
        self.released.append(victim.request_id)
        self.preempted.append(victim)
        self.swap_out += copies

    def place(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Put in a request's next tokens; they count as computed from here on."""
        share = request.advance(num_tokens, new_block_ids, self.number)
        self.scheduled.append(share)
        self.requests.append(request)
        self.tokens_left -= num_tokens
        if not share.num_samples and request.num_computed_tokens < request.num_tokens:
            self._count_partial(request, 1)

    def keep_for(self, request: Request, room: int) -> None:
        """Keep a long prompt's part of `room` tokens (policy/passing.py) for it until
        `place_begun`, if it does not end in this step, is the first of that kind and could use
        more."""
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
        that is different; returns its index."""
        shares = advance_decodes(islice(requests, first, first + self.tokens_left), self.number)
        last = first + len(shares)
        self.scheduled += shares
        self.requests += requests[first:last]
        self.tokens_left -= len(shares)
        return last

    def add_drafts(self, place: int, drafts: list[int], new_block_ids: list[int]) -> None:
        """Lengthen a share that has been put in by guesses at the tokens after it."""
        share, request = self.scheduled[place], self.requests[place]
        self.scheduled[place] = request.draft(share, drafts, new_block_ids)
        self.num_drafts += len(drafts)
        self.tokens_left -= len(drafts)

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
            num_scheduled_tokens=self._budget - self.tokens_left,
            num_drafts=self.num_drafts,
        )


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A plan given out, and the requests it is about (ids may be reused, objects are not)."""

    plan: SchedulerOutput
    requests: list[Request]  # of plan.scheduled, entry by entry
    preempted: list[Request]
    launched_at: float


class LaunchedSteps:
    """Steps that are out: a FIFO. They are numbered from 1 in the order they are launched."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._num_retired = 0
        self._last_retired_at = -math.inf
        self.last_duration_s = 0.0  # of the step retired last

    @property
    def next_number(self) -> int:
        """Number of the step that will be launched next."""
        return self._num_retired + len(self._steps) + 1

    def include(self, request: Request) -> bool:
        """Whether one of these steps names the request."""
        return request.last_step > self._num_retired

    def launch(self, plan: SchedulerOutput, builder: PlanBuilder, now: float) -> None:
        """`plan`, which `builder` made, is given out."""
        self._steps.append(LaunchedStep(plan, builder.requests, builder.preempted, now))

    def retire(self, plan: SchedulerOutput, now: float) -> LaunchedStep:
        """The oldest step, which must be that of `plan`, has come back.

        It ran since its launch or, if another step was before it in the FIFO, since that one's end.
        """
        step = self._steps.popleft()
        assert step.plan is plan, "steps must be retired in the order they were made"
        self._num_retired += 1
        self.last_duration_s = now - max(step.launched_at, self._last_retired_at)
        self._last_retired_at = now
        return step
