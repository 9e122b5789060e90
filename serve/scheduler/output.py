"""The plan of one step, and its result: everything the scheduler and the device tell each other.

Plain frozen data, made by `Scheduler.schedule`, read by the worker and by `Scheduler.update`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from serve.kv_cache.block_copy import BlockCopy as BlockCopy
from serve.messages import TokenLogprobs
from serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowData:
    """A request that takes a row in this step: new, resumed after recompute, or swapped in."""

    request_id: str
    sampling: SamplingParams
    token_ids: list[int]  # all known tokens: prompt, then what was sampled before
    num_prompt_tokens: int
    block_ids: list[int]  # the whole block table, this step's blocks included


class ScheduledRequest(NamedTuple):
    """One request's share of a step: tokens at positions start … start + num_tokens - 1.

    `token_ids` are those the CPU knows: all `num_tokens`, or one fewer when the last of them was
    sampled by a step still in flight (then the worker takes it from the row's last token).
    `new_block_ids` are appended to the row's table (empty for requests admitted in this step).
    `num_samples`: how many of its last tokens are each followed by a drawn one. 0 while the share
    does not reach the last known token, then 1, and one more for each draft: a guess at the token
    to be drawn, so that several may come of one step. Drafts are the last of `token_ids`, which
    are all known then.

    A named tuple: there is one per request and step, and a frozen dataclass costs three times as
    much to make.
    """

    request_id: str
    start: int
    num_tokens: int
    token_ids: list[int]
    new_block_ids: list[int]
    num_samples: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """Everything the worker must do in one step, in this order: release rows, swap out, swap in,
    copy, admit rows, run `scheduled` (write KV, attend, sample).

    `released` may name requests without a row (after a failed step): they are ignored. An id may be
    released and admitted in one plan. `scheduled` may be empty.
    """

    scheduled: list[ScheduledRequest]
    admitted: list[RowData]
    released: list[str]
    swap_out: list[BlockCopy]  # device → host
    swap_in: list[BlockCopy]  # host → device
    copy: list[BlockCopy]  # device → device
    num_scheduled_tokens: int
    num_drafts: int = 0  # among these

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.scheduled or self.released or self.swap_out or self.swap_in or self.copy)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled, by request id; only requests with `num_samples` appear in `token_ids`.

    A request with drafts gets those that were drawn, too, and the first token that is another. One
    in `failed` (the reason, by request id) must end: there was nothing to draw after its tokens.
    `prompt_logprobs` of a share that starts at `start` are those of prompt positions start + 1 on.
    """

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
