"""One request, seen from the front: what its deltas gave, until its reader takes it."""

from __future__ import annotations

import asyncio

from serve.engine.detokenizer import Detokenizer
from serve.engine.observer import FinishedRequest
from serve.engine.outputs import RequestOutput, joined
from serve.engine.repetition import RepetitionDetector
from serve.errors import ServeError
from serve.messages import FinishReason, RequestTimes, TokenDelta
from serve.sampling_params import SamplingParams

MAX_UNJOINED = 64
"""Outputs that a slow reader leaves are joined now and then, so that they take little memory."""


class RequestStream:
    """Changed by the engine's pump (`feed`, `fail`) and its one reader (`next`), on one event loop.

    `label` is the client's name for the request. `end_of_text_ids` are the ids whose stop the
    client did not ask for by number.
    """

    def __init__(
        self,
        *,
        label: str,
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        end_of_text_ids: frozenset[int],
        num_prompt_tokens: int,
        arrival_time: float,
    ) -> None:
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.num_prompt_tokens = num_prompt_tokens
        self.num_generated_tokens = 0
        self.num_cached_tokens = 0
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self._label = label
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
        self._times: RequestTimes | None = None
        self._failure: ServeError | None = None
        self._pending: list[RequestOutput] = []  # what the reader has not taken yet
        self._waiter: asyncio.Future[None] | None = None
        self._news_time = arrival_time

    def feed(self, delta: TokenDelta, time: float) -> None:
        """Take what the request gained in the step whose tokens were known at `time`.

        Afterwards `finish_reason` is set if it is over, by the engine or by a stop string.
        """
        assert self.finish_reason is None, self._label
        token_ids, ended_by = delta.token_ids, delta.finish_reason
        if self._repetition is not None:
            num_fresh = self._repetition.push(token_ids)
            if num_fresh is not None and (ended_by is None or num_fresh < len(token_ids)):
                token_ids, ended_by = token_ids[:num_fresh], FinishReason.REPETITION
        by_token = ended_by is FinishReason.STOP and bool(token_ids)
        self._hides_last = by_token and not self.sampling.include_stop_str_in_output
        shown = token_ids[:-1] if self._hides_last else token_ids
        text = self._detokenizer.push(shown, final=ended_by is not None)
        self.finish_reason = ended_by
        if text.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
            self._stop_reason = text.stopped_by
            self._hides_last = False
            token_ids = token_ids[: text.num_tokens]
        elif by_token and token_ids[-1] not in self._end_of_text_ids:
            self._stop_reason = token_ids[-1]
        self._error, self._retry_after_s = delta.error, delta.retry_after_s
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

    @property
    def label(self) -> str:
        """The client's name for the request."""
        return self._label

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
            assert self._failure is not None, self._label
            raise self._failure
        output = joined(self._pending)
        self._pending = []
        return output

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
        )

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():  # else it was cancelled
            self._waiter.set_result(None)

    def _output(self, delta: TokenDelta, text: str, token_ids: list[int]) -> RequestOutput:
        over = self.finish_reason is not None
        return RequestOutput(
            request_id=self._label,
            text=text,
            token_ids=token_ids,
            logprobs=delta.logprobs[: len(token_ids)] if delta.logprobs else None,
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            hides_last=self._hides_last,
            error=self._error,
            retry_after_s=self._retry_after_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            times=self.times(self._news_time) if over else None,
        )
