"""Steps that were given out and have not come back."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from serve.scheduler.output import SchedulerOutput
from serve.scheduler.plan_builder import PlanBuilder
from serve.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A plan given out, and the requests it is about (ids may be reused, objects are not)."""

    plan: SchedulerOutput
    requests: list[Request]  # of plan.scheduled, entry by entry
    preempted: list[Request]
    launched_at: float


class LaunchedSteps:
    """A FIFO. Steps are numbered from 1 in the order they are launched."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._num_retired = 0
        self._last_retired_at = -math.inf
        self.last_duration_s = 0.0  # of the step retired last

    @property
    def next_number(self) -> int:
        """Number of the step that will be launched next."""
        return self._num_retired + len(self._steps) + 1

    def name(self, request: Request) -> bool:
        """Whether one of these steps names the request."""
        return request.last_step > self._num_retired

    def launch(self, plan: SchedulerOutput, builder: PlanBuilder, now: float) -> None:
        """`plan`, which `builder` made, is given out."""
        self._steps.append(LaunchedStep(plan, builder.requests, builder.preempted, now))

    def retire(self, plan: SchedulerOutput, now: float) -> LaunchedStep:
        """The oldest step, which must be that of `plan`, has come back.

        It ran since its launch or, if another step was before it in the FIFO, since that one's end.
        """
        step = self._steps.popleft()
        assert step.plan is plan, "steps must be retired in the order they were made"
        self._num_retired += 1
        self.last_duration_s = now - max(step.launched_at, self._last_retired_at)
        self._last_retired_at = now
        return step
