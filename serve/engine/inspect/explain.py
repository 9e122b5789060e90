"""What the scheduler is doing and why, in plain values: for people who look in, at any rate a few
times a second, so nothing here may change anything or keep anything.

Times of day are ISO 8601 in UTC, and end in `_at`; spans are seconds, and end in `_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from serve.engine.inspect.settings import all_settings
from serve.engine.inspect.step_log import EndedRequest, StepLog
from serve.engine.public_ids import answer_ids, answer_of
from serve.messages import RequestTimes
from serve.scheduler.policy.passing import most_that_passes
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.view import SchedulerView

MAX_LISTED = 64
"""Requests of each kind that a state lists; their number is always told."""

RECENT_STEPS = 16
"""Steps whose mean duration is the next one's estimate."""

Values = dict[str, Any]


def scheduler_state(view: SchedulerView, log: StepLog) -> Values:
    """Settings, queues, pools and the phases of late."""
    num_running, num_waiting, num_swapped, num_blocks_used, num_host_blocks_used = view.counts()
    return {
        "settings": all_settings(view.limits),
        "num_running": num_running,
        "num_waiting": num_waiting,
        "num_waiting_tokens": view.num_waiting_tokens,
        "num_swapped": num_swapped,
        "num_blocks": view.num_blocks,
        "num_blocks_used": num_blocks_used,
        "num_host_blocks": view.num_host_blocks,
        "num_host_blocks_used": num_host_blocks_used,
        "block_size": view.block_size,
        "steps": _recent_steps(log),
        "running": [_progress(r) for r in view.running(MAX_LISTED)],
        "waiting": [_progress(r) for r in view.waiting(MAX_LISTED)],
        "swapped": [_progress(r) for r in view.swapped(MAX_LISTED)],
    }


def explain_requests(view: SchedulerView, log: StepLog, request_id: str) -> list[Values]:
    """What becomes of a request, one entry per choice; empty when nobody knows it.

    `request_id` is a response's id, that of one of its choices, or the X-Request-Id it was made
    from.
    """
    known: list[Request | EndedRequest] = [*log.live.values(), *log.ended]
    wanted = answer_ids(request_id)
    found = [r for r in known if r.label in wanted]
    found = found or [r for r in known if answer_of(r.label) in wanted]
    live = [r for r in found if isinstance(r, Request)]
    return [
        _live(view, log, each) if isinstance(each, Request) else _ended(view, each)
        for each in live or found
    ]


def _live(view: SchedulerView, log: StepLog, request: Request) -> Values:
    now = view.clock()
    return {
        **_progress(request),
        **_history(request.times(now), now),
        "finished_at": None,
        "finish_reason": None,
        **(_NOT_QUEUED if _is_running(request) else _queued(view, log, request)),
    }


def _ended(view: SchedulerView, ended: EndedRequest) -> Values:
    return {
        "id": ended.label,
        "status": "finished",
        "priority": ended.priority,
        "num_prompt_tokens": ended.num_prompt_tokens,
        "num_computed_tokens": ended.num_computed_tokens,
        "num_generated_tokens": ended.num_generated_tokens,
        "max_tokens": ended.max_tokens,
        "num_cached_tokens": ended.num_cached_tokens,
        "num_preemptions": ended.times.num_preemptions,
        **_history(ended.times, view.clock()),
        "finish_reason": ended.reason.value,
        **_NOT_QUEUED,
    }


def _progress(request: Request) -> Values:
    num_known = len(request.token_ids)
    return {
        "id": request.label,
        "status": _status(request),
        "priority": request.priority,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_generated_tokens": num_known - request.num_prompt_tokens,
        "max_tokens": request.max_num_tokens - request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
    }


def _history(times: RequestTimes, now: float) -> Values:
    """Moments by the wall's clock; `now` is this moment by the scheduler's."""
    wall = time.time() - now
    return {
        "age_s": round(times.finished_time - times.arrival_time, 3),
        "arrived_at": _at(wall, times.arrival_time),
        "started_at": _at(wall, times.first_scheduled_time),
        "first_token_at": _at(wall, times.first_token_time),
        "finished_at": _at(wall, times.finished_time),
    }


def _at(wall: float, moment: float | None) -> str | None:
    if moment is None:
        return None
    when = datetime.fromtimestamp(wall + moment, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_NOT_QUEUED: Values = {
    "reason": None,
    "num_ahead": None,
    "num_blocks_needed": None,
    "num_blocks_kept_free": None,
    "num_blocks_free": None,
    "estimated_start_s": None,
}


def _queued(view: SchedulerView, log: StepLog, request: Request) -> Values:
    ahead = view.num_ahead(request)
    needed, kept_free = view.blocks_needed(request)
    values: Values = {
        "num_ahead": ahead,
        "num_blocks_needed": needed,
        "num_blocks_kept_free": kept_free,
        "num_blocks_free": view.num_blocks_free,
    }
    hindrances = [*_lacking(view, request, needed, kept_free)]
    begun = view.prompt_in_the_way(request)
    if begun is not None:
        hindrances.append(_why_not_beside(begun, view.limits.fair_prefill))
    if ahead:
        hindrances.append(f"{_count(ahead, 'request')} ahead")
    start_s = view.seconds_to_start(ahead) if hindrances else _step_s(log)
    values["estimated_start_s"] = None if start_s is None else round(start_s, 3)
    parts = hindrances or ["it starts in one of the next steps"]
    if start_s is not None:
        parts.append(f"estimated start in {start_s:.1f} s")
    values["reason"] = f"{_status(request)}: {'; '.join(parts)}"
    return values


def _why_not_beside(begun: Request, fair_prefill: bool) -> str:
    lacking = f"a prompt that has begun lacks {_count(begun.num_uncomputed_tokens, 'token')}"
    passing = f", and only prompts of {most_that_passes(begun)} or fewer pass it"
    return lacking + (passing if fair_prefill else "")


def _lacking(view: SchedulerView, request: Request, needed: int, kept_free: int) -> Iterator[str]:
    """What there is too little of: "needs 12 blocks, 3 free"."""
    places, num_running = view.limits.max_num_seqs, view.num_running
    if num_running >= places:
        taken = "the only place" if places == 1 else f"all {places} places"
        yield f"{taken} of --max-num-seqs {'is' if places == 1 else 'are'} taken"
    if needed + kept_free > view.num_blocks:
        times = _count(request.num_preemptions, "preemption")
        yield f"after {times} it comes back only alone, and {num_running} run"
    elif needed + kept_free > view.num_blocks_free:
        also = f" and {kept_free} kept free for those that run" if kept_free else ""
        yield f"needs {_count(needed, 'block')}{also}, {view.num_blocks_free} free"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _is_running(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


def _status(request: Request) -> str:
    """running, waiting, swapped; or preempted: waiting again, to be computed again."""
    if request.status is RequestStatus.WAITING and request.num_preemptions:
        return "preempted"
    return request.status.name.lower()


def _step_s(log: StepLog) -> float | None:
    """How long the next step will take, if any has been made."""
    steps = list(log.steps)[-RECENT_STEPS:]
    return fmean(step.execute_s + step.update_s for step in steps) if steps else None


def _recent_steps(log: StepLog) -> Values:
    """Means over the steps that are remembered."""
    if not log.steps:
        return {"num_steps": 0}
    opened = [record.opened for record in log.steps]
    return {
        "num_steps": len(opened),
        "last_number": opened[-1].number,
        "mean_tokens": round(fmean(step.num_tokens for step in opened), 2),
        "mean_requests": round(fmean(step.num_requests for step in opened), 2),
        "mean_schedule_us": round(1e6 * fmean(s.scheduled - s.began for s in opened), 1),
        "mean_execute_us": round(1e6 * fmean(r.execute_s for r in log.steps), 1),
        "mean_update_us": round(1e6 * fmean(r.update_s for r in log.steps), 1),
    }
