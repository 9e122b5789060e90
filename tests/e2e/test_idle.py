"""What a server costs while nobody asks it anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.e2e.requests import client, completion
from tests.e2e.server_process import ServerProcess

WINDOW_S = 2.0
AT_REST = 0.1  # of the busy use: far above what timers cost, far below a thread that spins


class Use:
    """A process's share of one core, in the time that `measured` spans."""

    share = 0.0


@contextmanager
def measured(process: psutil.Process) -> Iterator[Use]:
    use, began, before = Use(), time.monotonic(), process.cpu_times()
    yield use
    after = process.cpu_times()
    spent = after.user - before.user + after.system - before.system
    use.share = spent / (time.monotonic() - began)


async def test_an_idle_server_uses_next_to_no_cpu(tiny_server: ServerProcess) -> None:
    front, engine = tiny_server.process, tiny_server.engine
    async with client(tiny_server) as http:
        with measured(engine) as busy_engine:
            end = time.monotonic() + WINDOW_S
            while time.monotonic() < end:
                answer = await http.post("/v1/completions", json=completion("Hello", 200))
                assert answer.status_code == 200, answer.text

        with measured(front) as idle_front, measured(engine) as idle_engine:
            time.sleep(WINDOW_S)  # the time that is measured

    assert idle_engine.share < AT_REST * busy_engine.share
    assert idle_front.share < AT_REST * busy_engine.share
