"""Taking in what a step sampled, or that it failed: what each request in it gained, or its end."""

from __future__ import annotations

from collections.abc import Callable, Collection

from serve.kv_cache.manager import KVCacheManager
from serve.messages import FinishReason, TokenDelta
from serve.scheduler.drafting.speculator import Speculator
from serve.scheduler.output import ScheduledRequest, SchedulerOutput, StepResult
from serve.scheduler.plan_builder import LaunchedSteps
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.preemption import Preemption
from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.roster import Roster
from serve.scheduler.totals import Totals

FINISHED = RequestStatus.FINISHED


class StepResults:
    """Retires launched steps, oldest first. `end` frees all that a request has."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        launched: LaunchedSteps,
        costs: StepCosts,
        totals: Totals,
        preemption: Preemption,
        end: Callable[[Request, FinishReason], None],
        speculator: Speculator | None = None,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._launched = launched
        self._costs = costs
        self._totals = totals
        self._preemption = preemption
        self._end = end
        self._speculator = speculator

    def take_in(
        self, plan: SchedulerOutput, result: StepResult, now: float, over: Collection[str] = ()
    ) -> list[TokenDelta]:
        """Append the tokens of the oldest step still out; end and free what has finished, and the
        requests that are `over`."""
        step = self._launched.retire(plan, now)
        if plan.scheduled:
            self._observe(plan)
            self._totals.step_tokens.append(plan.num_scheduled_tokens)
        deltas: list[TokenDelta] = []
        tell, make = deltas.append, tuple.__new__  # half the price of a named tuple's own
        nothing_else = TokenDelta("", [])[2:]
        num_generated = 0
        tells_more = bool(result.logprobs or result.prompt_logprobs or result.failed or over)
        entries = plan.scheduled
        if plan.num_drafts:
            entries = self._without_rejected(entries, step.requests, result)
        for entry, request in zip(entries, step.requests, strict=True):
            if request.status is FINISHED:  # ended while the step was out
                continue
            request_id, start, num_tokens, _, _, num_samples = entry
            if start < request.num_prompt_tokens:
                self._totals.prompt_tokens += request.count_prompt_tokens(start + num_tokens)
            reason = None
            if num_samples:
                token_ids = result.token_ids[request_id]
                reason = request.append(token_ids)
            if start + num_tokens >= request.next_commit:
                self._commit(entry, request)
            if num_samples and reason is None and not (tells_more or request.owes_times):
                tell(make(TokenDelta, (request_id, token_ids, *nothing_else)))
                num_generated += len(token_ids)
                continue  # nearly all of a busy step is this
            if num_samples and request_id in over:
                reason = FinishReason.STOP
            delta = take_gain(entry, request, result, reason, now)
            if delta is not None:
                deltas.append(delta)
                num_generated += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._end(request, delta.finish_reason)
        self._totals.generation_tokens += num_generated
        self._roster.drop_ended()
        return deltas

    def fail(self, plan: SchedulerOutput, reason: str, now: float) -> list[TokenDelta]:
        """End the requests of a step that raised; nothing it should have written is used again."""
        step = self._launched.retire(plan, now)
        self._roster.release_again(plan.released)
        failed = step.requests + [r for r in step.preempted if self._lost_its_copy(r)]
        deltas = []
        for request in failed:
            if request.status is not FINISHED:
                self._end(request, FinishReason.ERROR)
                deltas.append(
                    TokenDelta(
                        request.request_id,
                        [],
                        finish_reason=FinishReason.ERROR,
                        error=reason,
                        times=request.times(now),
                    )
                )
        self._roster.drop_ended()
        return deltas

    def _observe(self, plan: SchedulerOutput) -> None:
        """What a step cost. One with drafts says nothing of prompts."""
        if not plan.num_drafts:
            self._costs.observe(plan, self._launched.last_duration_s)
        if self._speculator is not None:
            self._speculator.observe(plan, self._launched.last_duration_s)

    def _without_rejected(
        self, entries: list[ScheduledRequest], requests: list[Request], result: StepResult
    ) -> list[ScheduledRequest]:
        """The shares as they would be if only right drafts had been in them."""
        assert self._speculator is not None
        right = []
        for entry, request in zip(entries, requests, strict=True):
            if entry.num_samples > 1 and request.status is not FINISHED:
                num_drafts = entry.num_samples - 1
                num_accepted = max(0, len(result.token_ids[entry.request_id]) - 1)
                num_rejected = num_drafts - num_accepted
                self._roster.verified(request, num_rejected)
                self._speculator.verified(request, num_drafts, num_accepted)
                entry = entry._replace(
                    num_tokens=entry.num_tokens - num_rejected, num_samples=1 + num_accepted
                )
            right.append(entry)
        return right

    def _commit(self, entry: ScheduledRequest, request: Request) -> None:
        """Blocks that this step has filled may be found by others from now on; with known tokens,
        which drafts behind one that ended the request are not."""
        computed = min(entry.start + entry.num_tokens, len(request.token_ids))
        request.committed(computed, self._kv.block_size)
        if self._kv.enable_prefix_caching and request.status is RequestStatus.RUNNING:
            self._kv.commit(request.request_id, request.known_hashes(), computed)

    def _lost_its_copy(self, victim: Request) -> bool:
        """Whether a failed step's victim must end, too. One still swapped out is recomputed."""
        if victim.status is RequestStatus.SWAPPED and not self._launched.include(victim):
            self._preemption.recompute_later(victim)
            return False
        return victim.status is not RequestStatus.WAITING


def take_gain(
    entry: ScheduledRequest,
    request: Request,
    result: StepResult,
    reason: FinishReason | None,
    now: float,
) -> TokenDelta | None:
    """What a request gained, its tokens being appended, and which counts as told from now on; None
    when there is nothing to tell.

    `reason` is what appending them said. A delta with a `finish_reason` is the last one: the caller
    ends the request.
    """
    token_ids: list[int] = []
    error = None
    if entry.num_samples:
        num_before = entry.start + entry.num_tokens - (entry.num_samples - 1)
        num_appended = len(request.token_ids) - num_before
        token_ids = result.token_ids[entry.request_id][:num_appended]
        if token_ids:
            request.sampled_at(now)
        error = result.failed.get(entry.request_id) if reason is None else None
        if error is not None:
            reason = FinishReason.ERROR
    elif entry.start + entry.num_tokens == request.max_num_tokens:
        reason = FinishReason.LENGTH  # max_tokens=0: the prompt was all there was to do
    scored = result.prompt_logprobs.get(entry.request_id)
    prompt_logprobs = request.take_prompt_logprobs(entry.start, scored)
    if not (token_ids or reason or prompt_logprobs):
        return None
    logprobs = result.logprobs.get(entry.request_id)
    return TokenDelta(
        entry.request_id,
        token_ids,
        logprobs=None if logprobs is None else logprobs[: len(token_ids)],
        prompt_logprobs=prompt_logprobs,
        finish_reason=reason,
        error=error,
        times=request.take_times(now) if request.owes_times or reason is not None else None,
        num_cached_tokens=request.num_cached_tokens,
    )
