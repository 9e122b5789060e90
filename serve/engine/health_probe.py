"""Is the executor broken, or were the requests it failed on?"""

from __future__ import annotations

import logging

from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.worker.executor import Executor

PROBE_ID = "health-probe"  # the front's ids are numbers
NULL_BLOCK = 0

logger = logging.getLogger(__name__)


def answers(executor: Executor, released: list[str]) -> bool:
    """Whether a step with one token, which is nobody's, succeeds.

    Its KV goes to the null block, which nobody reads. There must be a row for it once those that
    are `released` have been given back.
    """
    probe = SchedulerOutput(
        scheduled=[ScheduledRequest(PROBE_ID, 0, 1, [0], [], True)],
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
            executor.execute(plan).wait()
        except Exception as error:
            logger.error("the health probe failed, too: %s: %s", type(error).__name__, error)
            works = False
    return works
