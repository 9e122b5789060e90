"""The last steps and the last requests, kept so that people can look into the engine.

Kept always, so a step of decodes must cost next to nothing: it is one tuple of counts. Who did
what is noted only when something changes: a prompt's chunk, an admission, a preemption, an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from serve.messages import AddRequest, FinishReason, RequestTimes, TokenDelta
from serve.scheduler.output import ScheduledRequest, SchedulerOutput
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.view import SchedulerView

NUM_KEPT = 2048
"""Steps, and ended requests, that are remembered."""


class Chunk(NamedTuple):
    """More than one token of a request in one step. `label` is the id that clients know."""

    label: str
    start: int
    num_tokens: int
    num_recomputed: int  # of these, computed before and lost by preemption


class Change(NamedTuple):
    """A request that got or lost its blocks in a step, and how."""

    label: str
    how: str  # start, resume, swap_in; recompute, swap_out


class Changes(NamedTuple):
    """What a step did beside decoding."""

    chunks: tuple[Chunk, ...] = ()
    admitted: tuple[Change, ...] = ()
    preempted: tuple[Change, ...] = ()


NO_CHANGES = Changes()


class OpenStep(NamedTuple):
    """A step when it is launched. Counts are those after scheduling it."""

    number: int
    began: float
    scheduled: float
    num_tokens: int
    num_requests: int
    changes: Changes
    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks_used: int
    num_host_blocks_used: int
    num_swapped_out: int  # blocks
    num_swapped_in: int
    num_context_tokens: int | None  # KV that decodes read; counted only for a sink
    num_drafts: int  # among the tokens


class StepRecord(NamedTuple):
    """A retired step. `began` with overlap: when the step before it was out of the way."""

    opened: OpenStep
    execute_s: float
    update_s: float
    num_accepted: int  # drafts that requests gained


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request's history."""

    label: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_cached_tokens: int
    priority: int
    reason: FinishReason
    times: RequestTimes


class LogSink(Protocol):
    """Takes what the log notes out of the process."""

    def step(self, record: StepRecord) -> None:
        """A step has been retired."""

    def end(self, ended: EndedRequest, hashes: Sequence[bytes]) -> None:
        """A request is over; `hashes` are those of its full blocks, as far as they are known."""


class StepLog:
    """Changed by EngineCore only. `sink` is told everything as it happens."""

    def __init__(self, view: SchedulerView, sink: LogSink | None = None) -> None:
        self.live: dict[str, Request] = {}
        self.steps: deque[StepRecord] = deque(maxlen=NUM_KEPT)
        self.ended: deque[EndedRequest] = deque(maxlen=NUM_KEPT)
        self._view = view
        self._clock = view.clock
        self._sink = sink
        self._lost: dict[str, str] = {}  # preempted requests, and how they will come back
        self._num_launched = 0
        self._last_known = 0.0

    # ------------------------------------------------------------------ requests

    def added(self, message: AddRequest) -> None:
        """The scheduler has queued a request."""
        self.live[message.request_id] = self._view.live[message.request_id]

    def aborted(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """The scheduler has ended these, if it had them, for the front's reason."""
        now = self._clock()
        for request_id in request_ids:
            self._end(request_id, reason, None, now)

    def told(self, deltas: Sequence[TokenDelta]) -> None:
        """These deltas came out of the scheduler; some may end requests."""
        if len(self.live) > len(self._view.live):
            now = self._clock()
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._end(delta.request_id, delta.finish_reason, delta.times, now)

    # ------------------------------------------------------------------ steps

    def launched(self, plan: SchedulerOutput, began: float) -> OpenStep:
        """The scheduler has made a step, which it began to plan at `began`."""
        num_requests = len(plan.scheduled)
        is_quiet = plan.num_scheduled_tokens == num_requests + plan.num_drafts and not (
            plan.admitted or plan.released
        )
        self._num_launched += 1
        values = (
            self._num_launched,
            began,
            self._clock(),
            plan.num_scheduled_tokens,
            num_requests,
            NO_CHANGES if is_quiet else self._changes(plan),
            *self._view.counts(),
            len(plan.swap_out),
            len(plan.swap_in),
            None if self._sink is None else _context_tokens(plan),
            plan.num_drafts,
        )
        return tuple.__new__(OpenStep, values)  # a third of the price of its own __new__

    def retired(self, step: OpenStep, known: float, deltas: Sequence[TokenDelta]) -> None:
        """A step's result was known at `known`, and has been taken in with these deltas."""
        begin = max(step.scheduled, self._last_known)  # it ran after the step before it
        self._last_known = known
        num_accepted = _num_accepted(deltas) if step.num_drafts else 0
        record = StepRecord(step, known - begin, self._clock() - known, num_accepted)
        self.steps.append(record)
        if self._sink is not None:
            self._sink.step(record)
        self.told(deltas)

    # ------------------------------------------------------------------ inside

    def _changes(self, plan: SchedulerOutput) -> Changes:
        preempted = [self._preempted(i) for i in plan.released if self._is_queued(i)]
        admitted = [self._admitted(row.request_id) for row in plan.admitted]
        chunks = [self._chunk(entry) for entry in plan.scheduled if is_chunk(entry)]
        return Changes(tuple(chunks), tuple(admitted), tuple(preempted))

    def _is_queued(self, request_id: str) -> bool:
        """Whether a request whose row was released lives on: then it was preempted."""
        request = self._view.live.get(request_id)
        return request is not None and request.status is not RequestStatus.RUNNING

    def _preempted(self, request_id: str) -> Change:
        request = self.live[request_id]
        is_swapped = request.status is RequestStatus.SWAPPED
        self._lost[request_id] = "swap_in" if is_swapped else "resume"
        return Change(request.label, "swap_out" if is_swapped else "recompute")

    def _admitted(self, request_id: str) -> Change:
        return Change(self.live[request_id].label, self._lost.pop(request_id, "start"))

    def _chunk(self, entry: ScheduledRequest) -> Chunk:
        request = self.live[entry.request_id]
        again = 0
        if request.num_preemptions:
            computed_before = request.num_prompt_tokens_counted
            if computed_before == request.num_prompt_tokens:
                computed_before = len(request.token_ids) - 1
            end = min(entry.start + entry.num_tokens, computed_before)
            again = max(0, end - entry.start)
        return Chunk(request.label, entry.start, entry.num_tokens, again)

    def _end(
        self, request_id: str, reason: FinishReason, times: RequestTimes | None, now: float
    ) -> None:
        request = self.live.pop(request_id, None)
        if request is None:  # refused at the door, or unknown
            return
        self._lost.pop(request_id, None)
        ended = EndedRequest(
            request.label,
            request.num_prompt_tokens,
            request.num_computed_tokens,
            len(request.token_ids) - request.num_prompt_tokens,
            request.max_num_tokens - request.num_prompt_tokens,
            request.num_cached_tokens,
            request.priority,
            reason,
            times or request.times(now),
        )
        self.ended.append(ended)
        if self._sink is not None:
            self._sink.end(ended, request.block_hashes.values)


def is_chunk(entry: ScheduledRequest) -> bool:
    """Whether a share has more than one token that is no draft."""
    return entry.num_tokens > max(1, entry.num_samples)


def _num_accepted(deltas: Sequence[TokenDelta]) -> int:
    """In a step with drafts: all that requests gained beyond a token each."""
    return sum(max(0, len(delta.token_ids) - 1) for delta in deltas)


def _context_tokens(plan: SchedulerOutput) -> int:
    return sum(entry.start + 1 for entry in plan.scheduled if not is_chunk(entry))
