"""What a retired step means for one request in it: its tokens, its end, what the front is told."""

from __future__ import annotations

from serve.messages import FinishReason, RequestTimes, TokenDelta, TokenLogprobs
from serve.scheduler.output import ScheduledRequest, StepResult
from serve.scheduler.request import Request


def describe_gain(
    entry: ScheduledRequest,
    request: Request,
    result: StepResult,
    reason: FinishReason | None,
    now: float,
) -> TokenDelta | None:
    """What a request gained, its tokens being appended; None when there is nothing to tell.

    `reason` is what appending them said. A delta with a `finish_reason` is the last one: the caller
    ends the request.
    """
    token_ids: list[int] = []
    if entry.samples:
        num_appended = len(request.token_ids) - entry.start - entry.num_tokens
        token_ids = result.token_ids[entry.request_id][:num_appended]
        if request.first_token_time is None:
            request.first_token_time = now
            request.owes_times = True
    elif entry.start + entry.num_tokens == request.max_num_tokens:
        reason = FinishReason.LENGTH  # max_tokens=0: the prompt was all there was to do
    prompt_logprobs = _new_prompt_logprobs(entry, request, result)
    if not (token_ids or reason or prompt_logprobs):
        return None
    logprobs = result.logprobs.get(entry.request_id)
    return TokenDelta(
        entry.request_id,
        token_ids,
        logprobs=None if logprobs is None else logprobs[: len(token_ids)],
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        times=_told_times(request, now) if request.owes_times or reason is not None else None,
        num_cached_tokens=request.num_cached_tokens,
    )


def _told_times(request: Request, now: float) -> RequestTimes:
    request.owes_times = False
    return request.times(now)


def count_prompt_tokens(entry: ScheduledRequest, request: Request) -> int:
    """Prompt tokens that were computed for the first time; they count as told from now on."""
    computed = min(entry.start + entry.num_tokens, request.num_prompt_tokens)
    new = max(0, computed - request.num_prompt_tokens_counted)
    request.num_prompt_tokens_counted += new
    return new


def _new_prompt_logprobs(
    entry: ScheduledRequest, request: Request, result: StepResult
) -> list[TokenLogprobs] | None:
    """Prompt logprobs that were not told before: a recomputed prompt is scored twice."""
    scored = result.prompt_logprobs.get(entry.request_id)
    if scored is None:
        return None
    # scored[0] belongs to prompt position entry.start + 1.
    new = scored[max(0, request.num_prompt_logprobs_sent - entry.start) :]
    request.num_prompt_logprobs_sent += len(new)
    return new or None
