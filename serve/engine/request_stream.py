"""One request, seen from the front: what its deltas gave, until its reader takes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from serve.engine.observer import FinishedRequest
from serve.engine.outputs import RequestOutput, joined
from serve.errors import ServeError
from serve.messages import AddRequest, FinishReason, RequestTimes, TokenDelta, Told
from serve.text.detokenizer import Detokenizer
from serve.text.repetition import RepetitionDetector

MAX_UNJOINED = 64
"""Outputs that a slow reader leaves are joined now and then, so that they take little memory."""


class RequestStream:
    """Changed by the engine's pump (`feed`, `fail`) and its one reader (`next`), on one event loop.

    `end_of_text_ids` are the ids whose stop the client did not ask for by number.
    """

    def __init__(
        self, request: AddRequest, detokenizer: Detokenizer, end_of_text_ids: frozenset[int]
    ) -> None:
        self._request = request
        self.sampling = sampling = request.sampling
        self.arrival_time = arrival_time = request.arrival_time
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.engine = 0  # the number of the one that last worked on it; set by the pump
        self.num_generated_tokens = 0
        self.num_cached_tokens = 0
        self._generated: list[int] = []  # by the engine, also what no text shows
        self._num_prompt_logprobs = 0
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.label = request.request_id if request.label is None else request.label
        self._detokenizer = detokenizer
        self._end_of_text_ids = end_of_text_ids
        self._stop_reason: str | int | None = None
        self._hides_last = False
        self._repetition = (
            RepetitionDetector(sampling.repetition_detection, sampling.min_tokens)
            if sampling.repetition_detection is not None
            else None
        )
        self._error: str | None = None
        self._retry_after_s: float | None = None
        self._is_invalid = False
        self._times: RequestTimes | None = None
        self._failure: ServeError | None = None
        self._pending: list[RequestOutput] = []  # what the reader has not taken yet
        self._waiter: asyncio.Future[None] | None = None
        self._news_time = arrival_time

    def feed(self, delta: TokenDelta, time: float) -> None:
        """Take what the request gained in the step whose tokens were known at `time`.

        Afterwards `finish_reason` is set if it is over, by the engine or by a stop string.
        """
        assert self.finish_reason is None, self.label
        token_ids, ended_by = delta.token_ids, delta.finish_reason
        self._generated += token_ids
        self._num_prompt_logprobs += len(delta.prompt_logprobs or ())
        if self._repetition is not None:
            num_fresh = self._repetition.push(token_ids)
            if num_fresh is not None and (ended_by is None or num_fresh < len(token_ids)):
                token_ids, ended_by = token_ids[:num_fresh], FinishReason.REPETITION
        by_token = ended_by is FinishReason.STOP and self._ends_by_token(token_ids)
        self._hides_last = by_token and not self.sampling.include_stop_str_in_output
        shown = token_ids[:-1] if self._hides_last else token_ids
        text = self._detokenizer.push(shown, final=ended_by is not None)
        self.finish_reason = ended_by
        if text.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
            self._stop_reason = text.stopped_by
            self._hides_last = False
            token_ids = token_ids[: text.num_tokens]
        elif by_token and token_ids[-1] in self._asked_ends():
            self._stop_reason = token_ids[-1]
        self._error, self._retry_after_s = delta.error, delta.retry_after_s
        self._is_invalid = delta.is_invalid
        self._times = delta.times or self._times
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if token_ids:
            self.num_generated_tokens += len(token_ids)
            self.last_token_time = time
            if self.first_token_time is None:
                self.first_token_time = time
        self._news_time = time
        self._pending.append(self._output(delta, text.text, token_ids))
        if len(self._pending) == MAX_UNJOINED:
            self._pending = [joined(self._pending)]
        self._wake_reader()

    def _ends_by_token(self, token_ids: list[int]) -> bool:
        """Whether the last token is an end, and not the last part of a complete form."""
        grammar = self.sampling.grammar
        ends = self.sampling.stop_token_ids + (() if grammar is None else grammar.end_token_ids)
        return bool(token_ids) and token_ids[-1] in ends

    def _asked_ends(self) -> set[int]:
        """Ends that the client asked for by number."""
        return set(self.sampling.stop_token_ids) - self._end_of_text_ids

    def moved(self) -> AddRequest:
        """The request as another engine must get it to go on where this one's last step ended."""
        times = self._times
        return replace(
            self._request,
            generated_token_ids=list(self._generated),
            told=Told(
                num_prompt_logprobs=self._num_prompt_logprobs,
                num_cached_tokens=self.num_cached_tokens,
                first_scheduled_time=times.first_scheduled_time if times else None,
                first_token_time=times.first_token_time if times else None,
                num_preemptions=times.num_preemptions if times else 0,
            ),
        )

    def is_overdue(self, now: float) -> bool:
        """Whether its own timeout has passed before its first step."""
        timeout_s = self._request.timeout_s
        return timeout_s is not None and self._times is None and now > self.arrival_time + timeout_s

    def fail(self, failure: ServeError) -> None:
        """Nothing more will come: the reader gets what is pending, then the failure."""
        self._failure = failure
        self._wake_reader()

    async def next(self) -> RequestOutput:
        """Everything since the last call, as soon as there is something. Raises what it failed
        with."""
        if not self._pending and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._pending:
            assert self._failure is not None, self.label
            raise self._failure
        pending, self._pending = self._pending, []
        return pending[0] if len(pending) == 1 else joined(pending)

    def times(self, finished_time: float) -> RequestTimes:
        """The request's history as the front saw it, its end at `finished_time`."""
        return RequestTimes(
            arrival_time=self.arrival_time,
            first_scheduled_time=self._times.first_scheduled_time if self._times else None,
            first_token_time=self.first_token_time,
            finished_time=finished_time,
            num_preemptions=self._times.num_preemptions if self._times else 0,
        )

    def finished(self, reason: FinishReason, now: float) -> FinishedRequest:
        """What there is to tell about the request, which is over."""
        return FinishedRequest(
            reason=reason,
            times=self.times(now),
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=self.num_cached_tokens,
            sampling=self.sampling,
            engine=self.engine,
        )

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # else it was cancelled
            self._waiter.set_result(None)

    def _output(self, delta: TokenDelta, text: str, token_ids: list[int]) -> RequestOutput:
        over = self.finish_reason is not None
        return RequestOutput(
            request_id=self.label,
            text=text,
            token_ids=token_ids,
            logprobs=delta.logprobs[: len(token_ids)] if delta.logprobs else None,
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            hides_last=self._hides_last,
            error=self._error,
            retry_after_s=self._retry_after_s,
            is_invalid=self._is_invalid,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=self.times(self._news_time) if over else None,
        )
