"""A device that takes time and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve.scheduler.output import SchedulerOutput, StepResult
from serve.simulate.clock import VirtualClock
from serve.simulate.cost import LinearCost, load_of
from serve.worker.executor import TokenMask, WorkerInfo

VOCAB_SIZE = 2**31


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """Done at a known time: waiting for it is letting that time come."""

    plan: SchedulerOutput
    done_at: float
    clock: VirtualClock

    def sample(self, mask: TokenMask | None) -> _PendingStep:
        """Its tokens come of nothing, and no mask can change them."""
        assert mask is None, "simulated tokens are not masked"
        return self

    def wait(self) -> StepResult:
        self.clock.advance_to(self.done_at)
        return StepResult(
            {e.request_id: [_token(e.start)] for e in self.plan.scheduled if e.num_samples}
        )


class SimulatedExecutor:
    """An Executor in virtual time: steps run one after the other, each as long as `cost` says."""

    def __init__(
        self,
        info: WorkerInfo,
        cost: LinearCost,
        clock: VirtualClock,
        on_launch: Callable[[float], None],
    ) -> None:
        """`on_launch` is told the duration of every step that takes time, when it is given out."""
        self._info = info
        self._cost = cost
        self._clock = clock
        self._on_launch = on_launch
        self._free_at = 0.0

    def start(self) -> WorkerInfo:
        """The sizes it was made with."""
        return self._info

    def forward(self, plan: SchedulerOutput) -> _PendingStep:
        """Queue a step behind those before it. Giving back rows takes no time."""
        if plan.scheduled or plan.swap_out or plan.swap_in:
            duration_s = self._cost.seconds(load_of(plan))
            self._free_at = max(self._clock.now, self._free_at) + duration_s
            self._on_launch(duration_s)
        return _PendingStep(plan, self._free_at, self._clock)

    def close(self) -> None:
        """There is nothing to free."""


def _token(position: int) -> int:
    """Some token; its position keeps blocks of one answer apart from each other."""
    return position
