"""One simulation: the real engine core, scheduler and cache over a device made of costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.config import EngineConfig
from serve.engine.build import core_over
from serve.messages import EngineStats, FinishReason, FromEngine, ToEngine, TokenDelta
from serve.simulate.clock import VirtualClock
from serve.simulate.cost import LinearCost
from serve.simulate.executor import SimulatedExecutor
from serve.simulate.workload import SimRequest
from serve.worker.executor import WorkerInfo


@dataclass(slots=True)
class History:
    """What became of one request; changed only by the simulation it belongs to."""

    request: SimRequest
    token_times: list[float] = field(default_factory=list)
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    refusal: str | None = None  # why it was not taken

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None when there is no other."""
        later = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished simulation."""

    histories: list[History]
    stats: EngineStats
    end_s: float
    num_steps: int
    busy_s: float
    kv_use: float  # mean share of the pool in use, over time while there was work
    max_kv_use: float


def simulate(
    workload: Sequence[SimRequest], config: EngineConfig, sizes: WorkerInfo, cost: LinearCost
) -> Outcome:
    """Run a workload (in order of arrival) to its end. Raises ConfigError for impossible settings.

    The same arguments give the same outcome to the last bit.
    """
    return _Simulation(workload, config, sizes, cost).run()


class _Simulation:
    """Delivers requests when they are due, steps the core, and notes what comes out."""

    def __init__(
        self,
        workload: Sequence[SimRequest],
        config: EngineConfig,
        sizes: WorkerInfo,
        cost: LinearCost,
    ) -> None:
        self._clock = VirtualClock()
        executor = SimulatedExecutor(sizes, cost, self._clock, self._launched)
        self._core, _ = core_over(executor, config, _Nowhere(), _Nowhere(), self._clock)
        self._kv = self._core.scheduler.kv
        self._due = deque(enumerate(workload))
        self._histories = [History(request) for request in workload]
        self._num_steps = 0
        self._busy_s = 0.0
        self._block_seconds = 0.0
        self._max_blocks = 0

    def run(self) -> Outcome:
        """Until every request has ended."""
        core, clock, due = self._core, self._clock, self._due
        while due or core.has_work():
            if not core.has_work():
                clock.advance_to(due[0][1].arrival_s)
            while due and due[0][1].arrival_s <= clock.now:
                number, request = due.popleft()
                core.handle(request.message(str(number)))
            for delta in core.step():
                self._note(delta, clock.now)
        core.close()
        return Outcome(
            histories=self._histories,
            stats=core.scheduler.stats(),
            end_s=clock.now,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            kv_use=self._block_seconds / max(self._busy_s, 1e-12) / self._kv.num_blocks,
            max_kv_use=self._max_blocks / self._kv.num_blocks,
        )

    def _launched(self, duration_s: float) -> None:
        """A step of this length begins; its blocks are all taken."""
        num_blocks = self._kv.num_blocks_used
        self._num_steps += 1
        self._busy_s += duration_s
        self._block_seconds += duration_s * num_blocks
        self._max_blocks = max(self._max_blocks, num_blocks)

    def _note(self, delta: TokenDelta, now: float) -> None:
        history = self._histories[int(delta.request_id)]
        if delta.token_ids:
            history.token_times.append(now)
        if delta.finish_reason is FinishReason.ERROR:
            history.refusal = delta.error
        elif delta.times is not None:
            history.first_scheduled_s = delta.times.first_scheduled_time
            history.num_preemptions = delta.times.num_preemptions
            history.num_cached_tokens = delta.num_cached_tokens


class _Nowhere:
    """The core's mail, unused: the simulation hands messages over itself."""

    def drain(self, block: bool) -> list[ToEngine]:
        """Nothing."""
        assert not block, "nobody would ever write"
        return []

    def send(self, message: FromEngine) -> None:
        """To nobody."""
