"""An engine process over the fake executor: what tests of the process boundary start.

The model path's name says how it behaves: "bad-config", "broken", "dies" (at once, without a
word), "slow" (every step takes long), anything else works.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from serve.config import EngineConfig
from serve.engine.build import core_over
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.process.engine_process import run_engine_process
from serve.errors import ConfigError
from serve.messages import EngineReady
from serve.scheduler.output import SchedulerOutput
from tests.fakes import FakeExecutor, FakePending

COMMAND = (sys.executable, "-m", "tests.engine.fake_engine_process")


class SlowExecutor(FakeExecutor):
    """A step of minutes."""

    def forward(self, plan: SchedulerOutput) -> FakePending:
        time.sleep(600)
        return super().forward(plan)


def build(
    config: EngineConfig, model_path: Path, inbox: Inbox, outbox: Outbox
) -> tuple[EngineCore, EngineReady]:
    match model_path.name:
        case "bad-config":
            raise ConfigError("the model has no legs.")
        case "broken":
            raise ValueError("a bug")
        case "dies":
            os._exit(7)
    kind = SlowExecutor if model_path.name == "slow" else FakeExecutor
    executor = kind(num_blocks=64, block_size=config.cache.block_size, max_num_batched_tokens=64)
    return core_over(executor, config, inbox, outbox)


if __name__ == "__main__":
    run_engine_process(sys.argv[1:], build)
