"""Is the executor broken, or were the requests it failed on?"""

from __future__ import annotations

import logging

from serve.errors import EngineDead, OutOfMemory
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from serve.worker.executor import Executor

PROBE_ID = "health-probe"  # the front's ids are numbers
NULL_BLOCK = 0

MAX_FAILURES_IN_A_ROW = 3
"""Steps that may fail with none succeeding in between. After that the executor is given a step that
is nobody's: it counts as broken if that fails, too; else the fault was in the requests."""

logger = logging.getLogger(__name__)


class Supervisor:
    """Counts failed steps. While `in_doubt`, the executor must prove itself before the next one."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self.failures_in_a_row = 0
        self.in_doubt = False

    def succeeded(self) -> None:
        """A step has run."""
        self.failures_in_a_row = 0
        self.in_doubt = False

    def failed(self, error: Exception) -> None:
        """A step has raised."""
        if not isinstance(error, OutOfMemory):  # a smaller step may still work
            self.failures_in_a_row += 1
            self.in_doubt = self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW

    def may_go_on(self, num_in_flight: int) -> bool:
        """In doubt: whether the next step may be launched, now or only when none is out. Raises
        EngineDead if the executor fails without any request's help.

        While live requests hold every row, the next step is theirs, and proves as much.
        """
        released = self._scheduler.rows_free_after()
        if released is None:
            return True
        if num_in_flight:
            return False
        self._probe(released)
        return True

    def _probe(self, released: list[str]) -> None:
        if not can_step(self._executor, released):
            raise EngineDead(
                f"{self.failures_in_a_row} steps failed in a row, and one without requests; "
                "the server's log says why."
            )
        logger.warning("the executor works: the failed steps were their requests' fault")
        self.succeeded()


def can_step(executor: Executor, released: list[str]) -> bool:
    """Whether a step with one token, which is nobody's, succeeds.

    Its KV goes to the null block, which nobody reads. There must be a row for it once those that
    are `released` have been given back.
    """
    probe = SchedulerOutput(
        scheduled=[ScheduledRequest(PROBE_ID, 0, 1, [0], [], 1)],
        admitted=[
            RowData(PROBE_ID, SamplingParams(max_tokens=1, temperature=0.0), [0], 1, [NULL_BLOCK])
        ],
        released=released,
        swap_out=[],
        swap_in=[],
        copy=[],
        num_scheduled_tokens=1,
    )
    end = SchedulerOutput([], [], [PROBE_ID], [], [], [], 0)
    works = True
    for plan in (probe, end):
        try:
            executor.forward(plan).sample(None).wait()
        except Exception as error:
            logger.error("the health probe failed, too: %s: %s", type(error).__name__, error)
            works = False
    return works
