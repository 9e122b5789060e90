"""What a retired step means for one request in it: its tokens, its end, what the front is told."""

from __future__ import annotations

from serve.messages import FinishReason, RequestTimes, TokenDelta, TokenLogprobs
from serve.scheduler.output import ScheduledRequest, StepResult
from serve.scheduler.request import Request
from serve.scheduler.stopping import append_until_end


def apply_result(
    entry: ScheduledRequest, request: Request, result: StepResult, now: float
) -> TokenDelta | None:
    """Append what the step sampled. Returns the request's gain, None when there is nothing to tell.

    A delta with a `finish_reason` is the last one: the caller ends the request.
    """
    token_ids: list[int] = []
    reason: FinishReason | None = None
    tells_times = request.num_preemptions != request.num_preemptions_told
    if entry.samples:
        token_ids = result.token_ids[entry.request_id]
        reason = append_until_end(request, token_ids)
        if reason is not None:
            token_ids = token_ids[: len(request.token_ids) - entry.start - entry.num_tokens]
        if request.first_token_time is None:
            request.first_token_time = now
            tells_times = True
    elif entry.start + entry.num_tokens == request.max_num_tokens:
        reason = FinishReason.LENGTH  # max_tokens=0: the prompt was all there was to do
    if reason is None and not (result.logprobs or result.prompt_logprobs):
        if not token_ids:
            return None
        times = _told_times(request, now) if tells_times else None
        cached = request.num_cached_tokens
        return TokenDelta(entry.request_id, token_ids, None, None, None, None, times, cached)
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
        times=_told_times(request, now) if tells_times or reason is not None else None,
        num_cached_tokens=request.num_cached_tokens,
    )


def _told_times(request: Request, now: float) -> RequestTimes:
    request.num_preemptions_told = request.num_preemptions
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
