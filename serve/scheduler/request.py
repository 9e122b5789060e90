"""One generation's live state. There are no phases: computed tokens catch up with known ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from serve.kv_cache.prefix_index import BlockHashes
from serve.messages import AddRequest, FinishReason, RequestTimes, TokenLogprobs, Told
from serve.sampling_params import SamplingParams
from serve.scheduler.limits import kv_tokens_at_most
from serve.scheduler.output import ScheduledRequest

Order = tuple[int, float, int]
"""(level, virtual start, arrival number): a place in the order of service (service_order.py)."""


class RequestStatus(Enum):
    """Where a request is. Only a RUNNING one has device blocks and a row in the worker."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """`priority` (lower is more urgent) says who may displace whom; 0 but for the priority policy.

    Assigned only in this file: the parts of Scheduler say what happens to it by calling a method,
    and `advance_decodes` is the loop of a busy step.

    `num_tokens` counts the tokens in `token_ids` and those that launched steps will sample;
    `num_computed_tokens` those whose KV exists once every launched step has run.
    """

    request_id: str
    label: str  # the id that its client and the logs know
    sampling: SamplingParams
    arrival_time: float
    order: Order  # lower is served first
    token_ids: list[int]  # the prompt, then the sampled tokens that are known here
    num_prompt_tokens: int
    num_tokens: int
    max_num_tokens: int  # prompt + max_tokens
    max_kv_tokens: int  # tokens that ever need KV
    block_hashes: BlockHashes
    num_computed_tokens: int = 0
    num_slots: int = 0  # positions that the device blocks of a running request cover
    last_step: int = 0  # number of the last launched step that names it
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it first ran
    num_blocks_hoped: int = 0  # left in the prefix cache when it was preempted
    next_commit: int = 0  # computed tokens at which another block is full
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    # what has been reported, so that nothing is told twice
    num_prompt_tokens_counted: int = 0
    num_prompt_logprobs_sent: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    owes_times: bool = True  # the front has not been told its history so far
    priority: int = 0
    client: str = ""
    weight: float = 1.0
    timeout_s: float = math.inf  # from arrival to its first step
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def place_in_line(self) -> tuple[int, bool, float, int]:
        """Lower is served first: `order`, but with begun requests before those that never ran."""
        level, virtual_start, number = self.order
        return level, self.first_scheduled_time is None, virtual_start, number

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled, or to be sampled, by launched steps and not yet known here."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to run until the next one can be sampled."""
        known, needed = self.num_tokens, self.max_kv_tokens
        return (known if known < needed else needed) - self.num_computed_tokens

    @property
    def num_matchable_tokens(self) -> int:
        """Tokens whose KV may come from the prefix cache.

        Never the last one, since something must run to sample from; and with prompt logprobs, none
        whose successor has not been scored.
        """
        if (
            self.sampling.prompt_logprobs is not None
            and self.num_prompt_logprobs_sent < self.num_prompt_tokens - 1
        ):
            return self.num_prompt_logprobs_sent
        return self.num_tokens - 1

    def known_hashes(self) -> BlockHashes:
        """Those of all full blocks of known tokens."""
        self.block_hashes.extend(self.token_ids)
        return self.block_hashes

    def times(self, finished_time: float) -> RequestTimes:
        """Its history, as the front is told at the end."""
        return RequestTimes(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            finished_time,
            self.num_preemptions,
        )

    # ------------------------------------------------------------------ its blocks and its place

    def move_to(self, status: RequestStatus) -> None:
        """Another place in the roster."""
        self.status = status

    def finish(self, reason: FinishReason) -> None:
        """It is over."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason

    def start_at(self, num_matched: int, block_size: int) -> None:
        """It has a table whose first `num_matched` tokens were found in the prefix cache: they
        count as computed."""
        self.num_computed_tokens = num_matched
        self.num_blocks_hoped = 0
        self.next_commit = num_matched + block_size

    def note_cached(self) -> None:
        """What it starts with was cached; told once, when it first runs."""
        self.num_cached_tokens = self.num_computed_tokens

    def begin(self, now: float) -> None:
        """It has its first step."""
        self.first_scheduled_time = now

    def cover(self, num_slots: int) -> None:
        """Its device blocks cover so many positions."""
        self.num_slots = num_slots

    def committed(self, num_tokens: int, block_size: int) -> None:
        """The full blocks among so many computed tokens have been offered to others."""
        self.next_commit = (num_tokens // block_size + 1) * block_size

    def preempted(self, num_blocks_hoped: int = 0) -> None:
        """Its row was taken; so many of its blocks may still be in the prefix cache later."""
        self.num_preemptions += 1
        self.num_blocks_hoped = num_blocks_hoped
        self.owes_times = True

    def drop_kv(self) -> None:
        """Nothing of it is computed any more."""
        self.num_computed_tokens = 0

    # ------------------------------------------------------------------ its tokens

    def advance(self, num_tokens: int, new_block_ids: list[int], step: int) -> ScheduledRequest:
        """Its share of a step, whose tokens count as computed from here on."""
        start = self.num_computed_tokens
        end = start + num_tokens
        num_samples = int(end == self.num_tokens and end < self.max_num_tokens)
        self.num_computed_tokens = end
        self.num_tokens += num_samples
        self.last_step = step
        known = self.token_ids[start:end]
        return ScheduledRequest(
            self.request_id, start, num_tokens, known, new_block_ids, num_samples
        )

    def draft(
        self, share: ScheduledRequest, drafts: list[int], new_block_ids: list[int]
    ) -> ScheduledRequest:
        """Its share of a step with drafts behind it.

        They count as known and computed until they are verified, and no token after them does: so
        it lacks none, and no other step is planned for it meanwhile.
        """
        self.num_computed_tokens += len(drafts)
        self.num_tokens = self.num_computed_tokens
        return share._replace(
            num_tokens=share.num_tokens + len(drafts),
            token_ids=share.token_ids + drafts,
            new_block_ids=share.new_block_ids + new_block_ids,
            num_samples=1 + len(drafts),
        )

    def verified(self, num_rejected: int) -> None:
        """Of its drafts the last so many were wrong; the token in place of the first of them, or
        after them all, is drawn. What was written for them is overwritten by the next step."""
        self.num_tokens += 1 - num_rejected
        if self.status is not RequestStatus.WAITING:  # else nothing of it is computed any more
            self.num_computed_tokens -= num_rejected

    def append(self, sampled: list[int]) -> FinishReason | None:
        """Sampled tokens are known, up to one that ends the request; returns why it ended.

        A stop token within the first `min_tokens` does not count. One at the last allowed position
        is still a stop. The context's end needs no test: nothing is admitted that could pass it.
        """
        token_ids, stop_token_ids = self.token_ids, self.stop_token_ids
        for token_id in sampled:
            token_ids.append(token_id)
            if token_id in stop_token_ids:
                num_generated = len(token_ids) - self.num_prompt_tokens
                if num_generated > self.sampling.min_tokens:
                    return FinishReason.STOP
            if len(token_ids) >= self.max_num_tokens:
                return FinishReason.LENGTH
        return None

    # ------------------------------------------------------------------ what the front was told

    def sampled_at(self, now: float) -> None:
        """A token of it is known; the front is told when the first one was."""
        if self.first_token_time is None:
            self.first_token_time = now
            self.owes_times = True

    def take_times(self, now: float) -> RequestTimes:
        """Its history so far, which is told now."""
        self.owes_times = False
        return self.times(now)

    def count_prompt_tokens(self, end: int) -> int:
        """Of a prompt computed up to `end`, the tokens that were not counted before; now they
        are."""
        new = max(0, min(end, self.num_prompt_tokens) - self.num_prompt_tokens_counted)
        self.num_prompt_tokens_counted += new
        return new

    def take_prompt_logprobs(
        self, start: int, scored: list[TokenLogprobs] | None
    ) -> list[TokenLogprobs] | None:
        """Of those scored in a share that starts at `start`, the ones that were not told before: a
        recomputed prompt is scored twice."""
        if scored is None:
            return None
        # scored[0] belongs to prompt position start + 1.
        new = scored[max(0, self.num_prompt_logprobs_sent - start) :]
        self.num_prompt_logprobs_sent += len(new)
        return new or None


def advance_decodes(requests: Iterable[Request], step: int) -> list[ScheduledRequest]:
    """Shares of those that lack one token and have a slot for it, up to one that is different.

    What `Request.advance` would do, without a call for each: nearly all of a busy step is this.
    """
    shares: list[ScheduledRequest] = []
    place, make = shares.append, tuple.__new__  # half the price of a named tuple's own
    no_blocks: list[int] = []
    for request in requests:
        start = request.num_computed_tokens
        end = start + 1
        if end != request.num_tokens or end >= request.max_num_tokens or end > request.num_slots:
            break
        known = request.token_ids[start:end]
        share = (request.request_id, start, 1, known, no_blocks, 1)
        place(make(ScheduledRequest, share))
        request.num_computed_tokens = end
        request.num_tokens = end + 1
        request.last_step = step
    return shares


def make_request(
    message: AddRequest, order: Order, block_size: int, *, priority: int = 0, **extras: str
) -> Request:
    """A waiting request. `message` has been checked to fit; `extras`: see BlockHashes. A moved
    stream waits as one that was preempted does: its generated tokens are known, and none of them is
    computed."""
    prompt, sampling = message.prompt_token_ids, message.sampling
    assert sampling.max_tokens is not None
    known = prompt + message.generated_token_ids
    told = message.told or Told()
    return Request(
        request_id=message.request_id,
        label=message.label or message.request_id,
        sampling=sampling,
        arrival_time=message.arrival_time,
        order=order,
        token_ids=known,
        num_prompt_tokens=len(prompt),
        num_tokens=len(known),
        max_num_tokens=len(prompt) + sampling.max_tokens,
        max_kv_tokens=kv_tokens_at_most(len(prompt), sampling.max_tokens),
        block_hashes=BlockHashes(block_size, cache_salt=message.cache_salt or "", **extras),
        num_preemptions=told.num_preemptions,
        num_cached_tokens=told.num_cached_tokens,
        next_commit=block_size,
        num_prompt_tokens_counted=len(prompt) if message.generated_token_ids else 0,
        num_prompt_logprobs_sent=told.num_prompt_logprobs,
        first_scheduled_time=told.first_scheduled_time,
        first_token_time=told.first_token_time,
        priority=priority,
        client=message.client,
        weight=message.weight,
        timeout_s=math.inf if message.timeout_s is None else message.timeout_s,
        stop_token_ids=frozenset(sampling.stop_token_ids),
    )
