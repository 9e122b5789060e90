"""Steps that were given out and have not come back."""

from __future__ import annotations

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


class LaunchedSteps:
    """A FIFO. Steps are numbered from 1 in the order they are launched."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._num_retired = 0

    @property
    def next_number(self) -> int:
        """Number of the step that will be launched next."""
        return self._num_retired + len(self._steps) + 1

    def name(self, request: Request) -> bool:
        """Whether one of these steps names the request."""
        return request.last_step > self._num_retired

    def launch(self, plan: SchedulerOutput, builder: PlanBuilder) -> None:
        """`plan`, which `builder` made, is given out."""
        self._steps.append(LaunchedStep(plan, builder.requests, builder.preempted))

    def retire(self, plan: SchedulerOutput) -> LaunchedStep:
        """The oldest step, which must be that of `plan`, has come back."""
        step = self._steps.popleft()
        assert step.plan is plan, "steps must be retired in the order they were made"
        self._num_retired += 1
        return step
