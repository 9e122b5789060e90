"""What the scheduler is doing and why, in plain values: for people who look in, at any rate a few
times a second, so nothing here may change anything or keep anything.

Times of day are ISO 8601 in UTC, and end in `_at`; spans are seconds, and end in `_s`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from heapq import nsmallest
from operator import attrgetter
from statistics import fmean
from typing import Any

from serve.engine.inspect.settings import all_settings
from serve.engine.inspect.step_log import EndedRequest, StepLog
from serve.engine.public_ids import answer_ids, answer_of
from serve.messages import RequestTimes
from serve.scheduler.policy.passing import most_that_passes
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.scheduler import Scheduler

MAX_LISTED = 64
"""Requests of each kind that a state lists; their number is always told."""

RECENT_STEPS = 16
"""Steps whose mean duration is the next one's estimate."""

Values = dict[str, Any]


def scheduler_state(scheduler: Scheduler, log: StepLog) -> Values:
    """Settings, queues, pools and the phases of late."""
    roster, kv = scheduler.roster, scheduler.kv
    in_line = attrgetter("place_in_line")
    return {
        "settings": all_settings(scheduler.limits),
        "num_running": len(roster.running),
        "num_waiting": len(roster.waiting),
        "num_waiting_tokens": roster.waiting.num_tokens,
        "num_swapped": len(roster.swapped),
        "num_blocks": kv.num_blocks,
        "num_blocks_used": kv.num_blocks_used,
        "num_host_blocks": kv.num_host_blocks,
        "num_host_blocks_used": kv.num_host_blocks_used,
        "block_size": kv.block_size,
        "steps": _recent_steps(log),
        "running": [_progress(r) for r in roster.running[:MAX_LISTED]],
        "waiting": [_progress(r) for r in nsmallest(MAX_LISTED, roster.waiting, key=in_line)],
        "swapped": [_progress(r) for r in nsmallest(MAX_LISTED, roster.swapped, key=in_line)],
    }


def explain_requests(scheduler: Scheduler, log: StepLog, request_id: str) -> list[Values]:
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
        _live(scheduler, log, each) if isinstance(each, Request) else _ended(scheduler, each)
        for each in live or found
    ]


def _live(scheduler: Scheduler, log: StepLog, request: Request) -> Values:
    now = scheduler.clock()
    return {
        **_progress(request),
        **_history(request.times(now), now),
        "finished_at": None,
        "finish_reason": None,
        **(_NOT_QUEUED if _is_running(request) else _queued(scheduler, log, request)),
    }


def _ended(scheduler: Scheduler, ended: EndedRequest) -> Values:
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
        **_history(ended.times, scheduler.clock()),
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


def _queued(scheduler: Scheduler, log: StepLog, request: Request) -> Values:
    begun = scheduler.begun_prompt()
    passes = begun is not None and scheduler.passes(request, begun)
    most = most_that_passes(begun) if begun is not None and passes else math.inf
    ahead = scheduler.roster.num_ahead(request, most)
    needed, kept_free = scheduler.blocks_needed(request)
    values: Values = {
        "num_ahead": ahead,
        "num_blocks_needed": needed,
        "num_blocks_kept_free": kept_free,
        "num_blocks_free": scheduler.kv.num_blocks_free,
    }
    hindrances = [*_lacking(scheduler, request, needed, kept_free)]
    if begun is not None and not passes:
        hindrances.append(_why_not_beside(begun, scheduler.limits.fair_prefill))
    if ahead:
        hindrances.append(f"{_count(ahead, 'request')} ahead")
    start_s = scheduler.seconds_to_start(ahead) if hindrances else _step_s(log)
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


def _lacking(scheduler: Scheduler, request: Request, needed: int, kept_free: int) -> Iterator[str]:
    """What there is too little of: "needs 12 blocks, 3 free"."""
    kv, places = scheduler.kv, scheduler.limits.max_num_seqs
    num_running = len(scheduler.roster.running)
    if num_running >= places:
        taken = "the only place" if places == 1 else f"all {places} places"
        yield f"{taken} of --max-num-seqs {'is' if places == 1 else 'are'} taken"
    if needed + kept_free > kv.num_blocks:
        times = _count(request.num_preemptions, "preemption")
        yield f"after {times} it comes back only alone, and {num_running} run"
    elif needed + kept_free > kv.num_blocks_free:
        also = f" and {kept_free} kept free for those that run" if kept_free else ""
        yield f"needs {_count(needed, 'block')}{also}, {kv.num_blocks_free} free"


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
