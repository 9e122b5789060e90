"""What the scheduler is doing and why, in plain values: for people who look in, at any rate a few
times a second, so nothing here may change anything or keep anything."""

from __future__ import annotations

import re
from dataclasses import asdict
from heapq import nsmallest
from statistics import fmean
from typing import Any

from serve.engine.step_log import EndedRequest, Observed, StepLog
from serve.engine.trace import request_line
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.scheduler import Scheduler

MAX_LISTED = 64
"""Requests of each kind that a state lists; their number is always told."""

Values = dict[str, Any]


def scheduler_state(scheduler: Scheduler, log: StepLog) -> Values:
    """Limits, queues, pools and the phases of late."""
    roster, kv = scheduler.roster, scheduler.kv
    queued = nsmallest(MAX_LISTED, roster.waiting, key=_place_in_line)
    swapped = nsmallest(MAX_LISTED, roster.swapped, key=_place_in_line)
    return {
        "limits": asdict(scheduler.limits),
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
        "running": [_progress(_label(log, r), r) for r in roster.running[:MAX_LISTED]],
        "waiting": [_progress(_label(log, r), r) for r in queued],
        "swapped": [_progress(_label(log, r), r) for r in swapped],
    }


def explain_requests(scheduler: Scheduler, log: StepLog, request_id: str) -> list[Values]:
    """What becomes of a request, one entry per choice; empty when nobody knows it.

    `request_id` is a response's id or the X-Request-Id it was made from.
    """
    wanted = re.compile(rf"(chatcmpl-|cmpl-|msg_|resp_)?{re.escape(request_id)}(-\d+)?")
    live = [o for o in log.live.values() if wanted.fullmatch(o.label)]
    if live:
        return [_explain(scheduler, log, observed) for observed in live]
    return [_history(ended) for ended in log.ended if wanted.fullmatch(ended.label)]


def _explain(scheduler: Scheduler, log: StepLog, observed: Observed) -> Values:
    label, request = observed
    values = _progress(label, request)
    age_s = scheduler.clock() - request.arrival_time
    values["age_s"] = round(age_s, 3)
    if request.status is RequestStatus.RUNNING:
        values["reason"] = _running_reason(request)
        return values
    ahead = _num_ahead(scheduler, request)
    needed, free = scheduler.num_blocks_needed(request), scheduler.kv.num_blocks_free
    start_s = _seconds_to_start(scheduler, log, ahead)
    values |= {
        "num_ahead": ahead,
        "num_blocks_needed": needed,
        "num_blocks_free": free,
        "estimated_start_s": start_s,
        "reason": _waiting_reason(scheduler, request, ahead, needed, start_s),
    }
    return values


def _progress(label: str, request: Request) -> Values:
    num_known = len(request.token_ids)
    return {
        "id": label,
        "status": _status(request),
        "priority": request.priority,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_generated_tokens": num_known - request.num_prompt_tokens,
        "max_tokens": request.max_num_tokens - request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
    }


def _status(request: Request) -> str:
    """running, waiting, swapped; or preempted: waiting again, to be computed again."""
    if request.status is RequestStatus.WAITING and request.num_preemptions:
        return "preempted"
    return request.status.name.lower()


def _history(ended: EndedRequest) -> Values:
    values = request_line(ended)
    del values["type"]
    return {**values, "status": "finished"}


def _running_reason(request: Request) -> str:
    missing = request.num_prompt_tokens - request.num_computed_tokens
    if missing > 0:
        return (
            f"running: {request.num_computed_tokens} of {request.num_prompt_tokens} prompt tokens "
            "are computed"
        )
    num_generated = len(request.token_ids) - request.num_prompt_tokens
    most = request.max_num_tokens - request.num_prompt_tokens
    return f"running: {num_generated} tokens generated, of at most {most}"


def _waiting_reason(
    scheduler: Scheduler, request: Request, ahead: int, needed: int, start_s: float | None
) -> str:
    """The whole answer in one line: "waiting: needs 12 blocks, 3 free; 4 requests ahead"."""
    free, limits = scheduler.kv.num_blocks_free, scheduler.limits
    parts = []
    if len(scheduler.roster.running) >= limits.max_num_seqs:
        parts.append(f"all {limits.max_num_seqs} places of --max-num-seqs are taken")
    if needed > free:
        parts.append(f"needs {needed} blocks, {free} free")
    if ahead:
        parts.append("1 request ahead" if ahead == 1 else f"{ahead} requests ahead")
    if not parts:
        parts.append("nothing is in the way but the budget of a step")
    if start_s is not None:
        parts.append(f"estimated start in {start_s:.1f} s")
    return f"{_status(request)}: {'; '.join(parts)}"


def _place_in_line(request: Request) -> tuple[float, ...]:
    """Sorts as the queues do: begun requests first within their priority, then in order."""
    priority, *place = request.order
    return priority, request.num_preemptions == 0, *place


def _num_ahead(scheduler: Scheduler, request: Request) -> int:
    """Queued requests that will be served before it."""
    own = _place_in_line(request)
    queues = (scheduler.roster.waiting, scheduler.roster.swapped)
    return sum(_place_in_line(other) < own for queue in queues for other in queue)


def _seconds_to_start(scheduler: Scheduler, log: StepLog, ahead: int) -> float | None:
    """At the rate at which requests started of late; None before any two have.

    Time since the last start counts, so that the estimate grows while nothing starts.
    """
    if len(log.starts) < 2:
        return None
    per_start = (scheduler.clock() - log.starts[0]) / len(log.starts)
    return round((ahead + 1) * per_start, 3)


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


def _label(log: StepLog, request: Request) -> str:
    return log.live[request.request_id].label
