"""Requests with a grammar: how far each has come in it, and which tokens may come next.

All of it belongs to the engine core and follows a request's known tokens, so that preemption, swap
and recompute change nothing here, and a moved stream is where it was once its tokens are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from serve.answers.check import is_panic
from serve.engine.grammar.templates import Templates, fault_of
from serve.engine.grammar.vocabulary import Vocabulary
from serve.errors import RequestError
from serve.messages import AddRequest
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.worker.executor import TokenMask, words_for

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 5.0
"""A grammar that takes longer is refused; the usual ones take milliseconds."""
_BROKEN = "the form asked for could not be followed any further; see the server's log."


@dataclass(slots=True)
class _State:
    """One request's place in its grammar."""

    matcher: LLMatcher
    error: str | None = None

    def advance(self, token_ids: list[int]) -> None:
        """Take in tokens that were drawn."""
        with _panics_noted(self):
            if not self.matcher.is_stopped():
                self.matcher.consume_tokens(token_ids)
            if self.matcher.is_error():
                self.error = fault_of(self.matcher)

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Allow what may come next in bits [ceil(vocab / 32)]."""
        with _panics_noted(self):
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self.matcher.is_error():
                self.error = fault_of(self.matcher)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end."""
        return self.error is None and self.matcher.is_stopped()


class _Compiling(NamedTuple):
    """A request that waits for its grammar."""

    message: AddRequest
    template: Future[LLMatcher]
    since: float


class Compiled(NamedTuple):
    """A request whose grammar is ready, or cannot be had for the reason given."""

    message: AddRequest
    error: str | None


class Grammars:
    """All requests with a grammar; the engine core's thread alone calls it."""

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, timeout_s: float = COMPILE_TIMEOUT_S
    ) -> None:
        self._templates = Templates(vocabulary)
        self._num_words = words_for(vocab_size)
        self._timeout_s = timeout_s
        self._compiling: dict[str, _Compiling] = {}
        self._states: dict[str, _State] = {}

    # ------------------------------------------------------------------ requests come and go

    def begin(self, message: AddRequest) -> None:
        """Have a new request's grammar compiled; `compiled` says when it is."""
        assert message.sampling.grammar is not None
        template = self._templates.get(message.sampling.grammar)
        self._compiling[message.request_id] = _Compiling(message, template, time.monotonic())

    def compiled(self) -> list[Compiled]:
        """Those that need not wait any longer, in the order of their arrival."""
        now = time.monotonic()
        done = [
            waiting
            for waiting in self._compiling.values()
            if waiting.template.done() or now - waiting.since > self._timeout_s
        ]
        return [Compiled(waiting.message, self._settle(waiting)) for waiting in done]

    def wait(self, seconds: float) -> None:
        """Until one more is compiled, or for so long."""
        wait([c.template for c in self._compiling.values()], seconds, FIRST_COMPLETED)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These have ended. Unknown ids are ignored."""
        for request_id in request_ids:
            self._compiling.pop(request_id, None)
            self._states.pop(request_id, None)

    def close(self) -> None:
        """Compile nothing more."""
        self._templates.close()

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def num_followed(self) -> int:
        """Requests whose grammar is being followed."""
        return len(self._states)

    def _settle(self, waiting: _Compiling) -> str | None:
        """Follow a request's grammar from here on; or why that cannot be done."""
        message = waiting.message
        del self._compiling[message.request_id]
        if not waiting.template.done():
            return f"compiling the grammar took longer than {self._timeout_s:g} s; simplify it."
        try:
            state = _State(waiting.template.result().deep_copy())
        except RequestError as error:
            return str(error)
        except BaseException as error:
            if not is_panic(error) and not isinstance(error, Exception):
                raise
            logger.error("a grammar could not be compiled", exc_info=error)
            return "the grammar could not be compiled; see the server's log."
        state.advance(message.generated_token_ids)  # of a moved stream
        self._states[message.request_id] = state
        return state.error

    # ------------------------------------------------------------------ steps

    def concern(self, plan: SchedulerOutput) -> bool:
        """Whether a step draws a token of a request with a grammar."""
        states = self._states
        return bool(states) and any(
            entry.num_samples and entry.request_id in states for entry in plan.scheduled
        )

    def mask(self, plan: SchedulerOutput) -> TokenMask | None:
        """What may come next for each of them; every earlier step has been taken in."""
        rows: list[int] = []
        states: list[_State] = []
        place = 0
        for entry in plan.scheduled:
            if entry.num_samples and (state := self._states.get(entry.request_id)) is not None:
                assert entry.num_samples == 1, "a request with a grammar takes no drafts"
                if state.error is None and not state.is_over:
                    rows.append(place)
                    states.append(state)
            place += entry.num_samples
        if not rows:
            return None
        bits = np.full((len(rows), self._num_words), -1, dtype=np.int32)
        for row, state in zip(bits, states, strict=True):
            state.fill(row)
        return TokenMask(np.array(rows, dtype=np.int64), bits)

    def advance(self, plan: SchedulerOutput, result: StepResult) -> set[str]:
        """Take in a step's tokens; the requests that are complete with theirs. One whose grammar
        broke is put among the result's failed."""
        over: set[str] = set()
        if not self._states:
            return over
        for entry in plan.scheduled:
            state = self._states.get(entry.request_id)
            if state is None or not entry.num_samples:
                continue
            state.advance(result.token_ids.get(entry.request_id, []))
            if state.error is not None:
                logger.error("a grammar broke: %s", state.error)
                result.failed[entry.request_id] = _BROKEN
            elif state.is_over:
                over.add(entry.request_id)
        return over


@contextmanager
def _panics_noted(state: _State) -> Iterator[None]:
    """A panic of the matcher is that request's error, and nobody else's."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        state.error = f"panic: {error}"
