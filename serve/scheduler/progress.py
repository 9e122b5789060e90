"""What a retired step means for one request in it: its tokens, its end, what the front is told."""

from __future__ import annotations

from serve.messages import FinishReason, TokenDelta, TokenLogprobs
from serve.scheduler.output import ScheduledRequest, StepResult
from serve.scheduler.request import Request
from serve.scheduler.stopping import finish_reason


def apply_result(
    entry: ScheduledRequest, request: Request, result: StepResult, now: float
) -> TokenDelta | None:
    """Append what the step sampled. Returns the request's gain, None when there is nothing to tell.

    A delta with a `finish_reason` is the last one: the caller ends the request.
    """
    token_ids: list[int] = []
    reason: FinishReason | None = None
    if entry.samples:
        token_ids, reason = _append(request, result.token_ids[entry.request_id])
        if request.first_token_time is None:
            request.first_token_time = now
    elif entry.start + entry.num_tokens == request.max_num_tokens:
        reason = FinishReason.LENGTH  # max_tokens=0: the prompt was all there was to do
    if not (reason or result.logprobs or result.prompt_logprobs):
        if not token_ids:
            return None
        return TokenDelta(entry.request_id, token_ids, num_cached_tokens=request.num_cached_tokens)
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
        times=None if reason is None else request.times(now),
        num_cached_tokens=request.num_cached_tokens,
    )


def count_prompt_tokens(entry: ScheduledRequest, request: Request) -> int:
    """Prompt tokens that were computed for the first time; they count as told from now on."""
    computed = min(entry.start + entry.num_tokens, request.num_prompt_tokens)
    new = max(0, computed - request.num_prompt_tokens_counted)
    request.num_prompt_tokens_counted += new
    return new


def _append(request: Request, sampled: list[int]) -> tuple[list[int], FinishReason | None]:
    """Append sampled tokens up to one that ends the request; returns those, and why it ended."""
    for number, token_id in enumerate(sampled, start=1):
        request.token_ids.append(token_id)
        reason = finish_reason(request, token_id)
        if reason is not None:
            return sampled[:number], reason
    return sampled, None


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
