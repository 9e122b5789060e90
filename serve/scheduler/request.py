"""One generation's live state. There are no phases: computed tokens catch up with known ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from serve.kv_cache.prefix_index import BlockHashes
from serve.messages import AddRequest, FinishReason, RequestTimes, Told
from serve.sampling_params import SamplingParams
from serve.scheduler.limits import kv_tokens_at_most

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

    Made and changed only by Scheduler and its parts, `PlanBuilder.place` and `progress`.

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

    def times(self, finished_time: float) -> RequestTimes:
        """Its history, as the front is told at the end."""
        return RequestTimes(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            finished_time,
            self.num_preemptions,
        )


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
