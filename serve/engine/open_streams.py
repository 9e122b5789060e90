"""The streams that an engine owes something to, between its step outputs and their readers.

A reader that goes away, for whatever reason, ends in an abort, unless the engine is done with the
request already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection

from serve.engine.client import EngineClient
from serve.engine.observer import EngineObserver
from serve.engine.outputs import RequestOutput
from serve.engine.request_stream import RequestStream
from serve.errors import EngineDead, RequestAborted
from serve.messages import AbortRequests, AddRequest, FinishReason, StepOutputs, TokenDelta

EXPIRE_EVERY_S = 0.1
"""How often, while there is no engine, requests are looked at that may wait only so long."""
_OVERDUE = "its timeout passed while the engine was being started again."


class OpenStreams:
    """Lives on the engine's event loop. `before_asking` is called before the engine is asked for
    anything, and raises if that is in vain."""

    def __init__(
        self, client: EngineClient, observer: EngineObserver, before_asking: Callable[[], None]
    ) -> None:
        self._client = client
        self._observer = observer
        self._before_asking = before_asking
        self._owed: dict[str, RequestStream] = {}  # the engine still owes these deltas
        self._num_readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()

    def __len__(self) -> int:
        """How many the engine is not done with."""
        return len(self._owed)

    @property
    def num_readers(self) -> int:
        """How many are being read, though the engine may be done with them."""
        return self._num_readers

    async def until_all_read(self) -> None:
        """Wait until nobody reads any more."""
        while self._num_readers:  # the end of one may be what another waited for to begin
            await self._no_readers.wait()

    async def read(
        self, request: AddRequest, stream: RequestStream
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send the request, and yield what comes. Closing or cancelling this aborts it."""
        self._before_asking()
        self._owed[request.request_id] = stream
        self._num_readers += 1
        self._no_readers.clear()
        self._client.send(request)
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if request.request_id in self._owed:
                self._abort(request.request_id, FinishReason.ABORT, time.monotonic())
            self._num_readers -= 1
            if self._num_readers == 0:
                self._no_readers.set()

    def distribute(self, outputs: StepOutputs) -> None:
        """Feed each stream what it gained in a step."""
        engine = outputs.stats.engine
        for delta in outputs.deltas:
            stream = self._owed.get(delta.request_id)
            if stream is not None:  # else it was aborted while this was on its way
                self._feed(stream, delta, outputs.time, engine)

    def abort(self, labels: Collection[str]) -> None:
        """End requests by their labels; their readers get RequestAborted."""
        named = [(i, stream) for i, stream in self._owed.items() if stream.label in labels]
        for engine_id, stream in named:
            self._abort(engine_id, FinishReason.ABORT, time.monotonic())
            stream.fail(RequestAborted("This request was aborted by its id."))

    async def expire_while(self, is_away: Callable[[], bool]) -> None:
        """While there is no engine, end those that wait longer than they would."""
        while is_away():
            now = time.monotonic()
            for engine_id, stream in list(self._owed.items()):
                if stream.is_overdue(now):
                    delta = TokenDelta(
                        engine_id, [], finish_reason=FinishReason.TIMEOUT, error=_OVERDUE
                    )
                    self._feed(stream, delta, now, stream.engine)
            await asyncio.sleep(EXPIRE_EVERY_S)

    def move(self) -> None:
        """Send every one to the engine that has taken the last one's place."""
        for stream in self._owed.values():  # in the order of their arrival
            self._client.send(stream.moved())

    def fail(self, death: EngineDead) -> None:
        """End every one, now and for good."""
        orphans, self._owed = self._owed, {}
        now = time.monotonic()
        for stream in orphans.values():
            stream.fail(type(death)(*death.args))
            self._observer.request_finished(stream.finished(FinishReason.ERROR, now))

    def _feed(self, stream: RequestStream, delta: TokenDelta, now: float, engine: int) -> None:
        previous_time = stream.last_token_time
        stream.feed(delta, now)
        if delta.token_ids:
            if previous_time is None:
                stream.engine = engine
                self._observer.first_token(now - stream.arrival_time, engine)
            else:
                num_tokens = len(delta.token_ids)
                for _ in range(num_tokens):  # a step's tokens share its gap
                    self._observer.inter_token((now - previous_time) / num_tokens, engine)
        if delta.finish_reason is not None:
            del self._owed[delta.request_id]
            stream.engine = engine
            reason = stream.finish_reason or delta.finish_reason
            self._observer.request_finished(stream.finished(reason, now))
        elif stream.finish_reason is not None:  # a stop string, of which the engine knows nothing
            self._abort(delta.request_id, stream.finish_reason, now)

    def _abort(self, engine_id: str, reason: FinishReason, now: float) -> None:
        stream = self._owed.pop(engine_id)
        self._client.send(AbortRequests([engine_id], reason))
        self._observer.request_finished(stream.finished(reason, now))
