"""The back half of the engine: messages in, steps, deltas out. One thread owns everything here."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from serve.engine.grammar.grammars import Grammars
from serve.engine.grammar.vocabulary import no_vocabulary
from serve.engine.health import Supervisor
from serve.engine.inspect.controls import Controls
from serve.engine.inspect.step_log import OpenStep, StepLog
from serve.engine.inspect.trace import TraceFile
from serve.engine.prefix_file import PrefixFile
from serve.errors import OutOfMemory, QueueFull, RequestError
from serve.messages import (
    AbortRequests,
    AddRequest,
    Control,
    EngineStats,
    FinishReason,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenDelta,
)
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.scheduler import Scheduler
from serve.worker.executor import Executor, PendingTokens

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "internal error; see the server's log."
NO_MEMORY = "the server had no memory for a step; see its log."
"""All that a client is told of a failed step: what an exception says is for the log."""


COMPILE_POLL_S = 0.005
"""How often, while there is nothing to do but to compile a grammar, messages are looked for."""


class Inbox(Protocol):
    """Messages from the front."""

    def drain(self, block: bool) -> list[ToEngine]:
        """All messages that are there, oldest first. With `block`, waits until there is one."""


class Outbox(Protocol):
    """The way to the front."""

    def send(self, message: FromEngine) -> None:
        """Pass on a message; never blocks on the front."""


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Stands in for the result of a step that could not even be launched."""

    error: Exception

    def wait(self) -> StepResult:
        raise self.error


class EngineCore:
    """Drives the scheduler and the executor. `depth` is how many steps may be out at once.

    With depth 1 a step is launched and retired in one turn; with 2 the next step is launched before
    the last one's tokens are known, so that the device never waits for Python. What it did of late
    is in its `log`, and in the `trace` file if there is one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        depth: int = 1,
        trace: TraceFile | None = None,
        prefix_file: PrefixFile | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `grammars`, requests with one are refused."""
        assert depth >= 1, depth
        self.scheduler = scheduler
        self.executor = executor
        self.inbox = inbox
        self.outbox = outbox
        self.depth = depth
        self.log = StepLog(scheduler.view(), trace)
        self._trace = trace
        self._prefix_file = prefix_file
        self._controls = Controls(scheduler, self.log)
        self._in_flight: deque[tuple[SchedulerOutput, PendingTokens, OpenStep]] = deque()
        self._refused: list[TokenDelta] = []
        self._stopping = False
        self._stopped = False
        self._supervisor = Supervisor(scheduler, executor)
        self._grammars = Grammars(no_vocabulary, 0) if grammars is None else grammars
        self._last_stats: EngineStats | None = None

    def run(self) -> None:
        """Serve until Shutdown. Raises EngineDead when steps keep failing, and whatever is a bug.

        `close` comes afterwards, whatever happened.
        """
        while not self._stopped:
            self.turn(block=not self.has_work())
            if self._stopping and not self.has_work():
                self._stopped = True
        self.keep_prefixes()

    def turn(self, *, block: bool = False) -> None:
        """Take in what the front has sent (with `block`, once there is something), make a step and
        tell the front of it."""
        for message in self.inbox.drain(block):
            self.handle(message)
        if not self._stopped:
            self._send(self.step())

    def keep_prefixes(self) -> None:
        """Write the prefix cache to its file, if it has one; at an orderly end, before `close`."""
        if self._prefix_file is not None:
            self._prefix_file.save()

    def close(self) -> None:
        """Free the device, and end the trace."""
        self.executor.close()
        self._grammars.close()
        if self._trace is not None:
            self._trace.close()

    def has_work(self) -> bool:
        """Whether `step` has anything to do without a new message."""
        return bool(
            self._in_flight
            or self._refused
            or self.scheduler.has_work()
            or self._grammars.num_compiling
        )

    def handle(self, message: ToEngine) -> None:
        """Take in one message."""
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests(request_ids, reason):
                self.scheduler.abort(request_ids)
                self._grammars.forget(request_ids)
                self.log.aborted(request_ids, reason)
            case Control():
                self.outbox.send(self._controls.answer(message))
            case Shutdown(drain):
                self._stopping = True
                self._stopped = not drain

    def step(self) -> list[TokenDelta]:
        """Launch at most one step and retire at most one; returns what requests gained."""
        expired = self.scheduler.expire()
        if expired:
            self.log.told(expired)
        if self._grammars.num_compiling:
            self._queue_compiled()
        deltas, self._refused = self._refused + expired, []
        launched = self._launch(deltas)
        if self._in_flight and (len(self._in_flight) == self.depth or not launched):
            deltas += self._retire(*self._in_flight.popleft())
        if self._grammars.num_followed:
            self._grammars.forget(d.request_id for d in deltas if d.finish_reason is not None)
        return deltas

    def _launch(self, deltas: list[TokenDelta]) -> bool:
        """Give out the next step, if it may go and there is one; whether requests run in it. What
        had to be retired for it is added to `deltas`. Raises EngineDead when steps keep failing."""
        if self._supervisor.in_doubt and not self._supervisor.may_go_on(len(self._in_flight)):
            return False
        if len(self._in_flight) == self.depth or not self.scheduler.has_work():
            return False
        began = self.scheduler.clock()
        plan = self.scheduler.schedule()
        if not plan:
            assert self._in_flight, "requests are waiting, nothing runs, and nothing can start"
            return False
        step = self.log.launched(plan, began)
        self._in_flight.append((plan, self._execute(plan, deltas), step))
        return bool(plan.scheduled)

    def _add(self, message: AddRequest) -> None:
        if self._stopping:
            self._refuse(message, "the server is shutting down.")
        elif message.sampling.grammar is None:
            self._queue(message)
        else:
            self._grammars.begin(message)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammars are ready; the others keep waiting for theirs."""
        if not (self._in_flight or self._refused or self.scheduler.has_work()):
            self._grammars.wait(COMPILE_POLL_S)
        for message, error in self._grammars.compiled():
            if error is None:
                self._queue(message)
            else:
                self._refuse(message, error, is_invalid=True)

    def _queue(self, message: AddRequest) -> None:
        try:
            self.scheduler.add(message)
            self.log.added(message)
        except QueueFull as error:
            self._refuse(message, str(error), error.retry_after_s)
        except RequestError as error:
            self._refuse(message, str(error))

    def _refuse(
        self,
        message: AddRequest,
        reason: str,
        retry_after_s: float | None = None,
        *,
        is_invalid: bool = False,
    ) -> None:
        self._refused.append(
            TokenDelta(
                message.request_id,
                [],
                finish_reason=FinishReason.ERROR,
                error=reason,
                retry_after_s=retry_after_s,
                is_invalid=is_invalid,
            )
        )

    def _execute(self, plan: SchedulerOutput, deltas: list[TokenDelta]) -> PendingTokens:
        try:
            launch = self.executor.forward(plan)
            if not self._grammars.concern(plan):
                return launch.sample(None)
            # What a grammar allows follows from the tokens before, which are waited for while this
            # step's forward pass runs.
            while self._in_flight:
                deltas += self._retire(*self._in_flight.popleft())
            return launch.sample(self._grammars.mask(plan))
        except Exception as error:  # told when its turn to retire comes, after the steps before it
            return _FailedLaunch(error)

    def _retire(
        self, plan: SchedulerOutput, pending: PendingTokens, step: OpenStep
    ) -> list[TokenDelta]:
        try:
            result = pending.wait()
        except Exception as error:
            deltas = self._fail(plan, error)
            self.log.told(deltas)
            return deltas
        known = self.scheduler.clock()
        if plan.scheduled and self._supervisor.failures_in_a_row:  # giving back rows proves nothing
            self._supervisor.succeeded()
        deltas = self.scheduler.update(plan, result, self._grammars.advance(plan, result))
        self.log.retired(step, known, deltas)
        return deltas

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[TokenDelta]:
        """End the requests of a failed step."""
        self._supervisor.failed(error)
        reason = NO_MEMORY if isinstance(error, OutOfMemory) else INTERNAL_ERROR
        deltas = self.scheduler.fail(plan, reason)
        labels = {delta.request_id: self.log.live[delta.request_id].label for delta in deltas}
        logger.error("a step failed; it ends %s", ", ".join(labels.values()), exc_info=error)
        return [
            delta._replace(error=f"request {labels[delta.request_id]}: {delta.error}")
            for delta in deltas
        ]

    def _send(self, deltas: list[TokenDelta]) -> None:
        """Tell the front what happened; say nothing when neither tokens nor figures changed."""
        stats = self.scheduler.stats()
        if deltas or stats.step_tokens or stats != self._last_stats:
            self.outbox.send(StepOutputs(deltas, stats, self.scheduler.clock()))
            self._last_stats = stats
