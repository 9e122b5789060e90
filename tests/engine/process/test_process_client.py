"""The engine in a process of its own: start, answers, death, end. No model, no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from serve.config import EngineConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.observer import NoObserver
from serve.engine.process import process_client as process
from serve.engine.process.process_client import ProcessClient
from serve.engine.vigil import HEARTBEAT_S
from serve.errors import ConfigError, EngineDead
from serve.messages import AddRequest, EngineDied
from serve.sampling_params import SamplingParams
from tests.engine.fake_engine_process import COMMAND
from tests.fakes import reference_completion
from tests.text.tiny_tokenizers import served


def client_of(behaviour: str = "ok", command: Sequence[str] = COMMAND) -> ProcessClient:
    return ProcessClient(EngineConfig(), Path(behaviour), command)


def is_gone(pid: int | None) -> bool:
    return pid is not None and not psutil.pid_exists(pid)


async def answer(engine: AsyncEngine, prompt: list[int], max_tokens: int) -> list[int]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [t async for out in engine.generate(prompt, sampling) for t in out.token_ids]


async def test_requests_are_answered_across_the_boundary() -> None:
    client = client_of()
    engine = AsyncEngine(client, served(), NoObserver())
    await engine.start()
    try:
        prompts = [[i, i + 1] for i in range(10)]
        answers = await asyncio.gather(*(answer(engine, prompt, 8) for prompt in prompts))
        sampling = SamplingParams(max_tokens=8)
        assert answers == [reference_completion(prompt, sampling) for prompt in prompts]
    finally:
        await engine.close()
    assert is_gone(client.pid)


async def test_ops_01_a_killed_engine_is_noticed_by_every_stream() -> None:
    client = client_of()
    engine = AsyncEngine(client, served(), NoObserver())
    await engine.start()
    try:
        readers = [asyncio.create_task(answer(engine, [i], 1000)) for i in range(3)]
        await asyncio.sleep(0)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results)
        assert "SIGKILL" in await engine.wait_dead()
        assert isinstance(await client.receive(), EngineDied)  # and every time
        assert isinstance(await client.receive(), EngineDied)
        client.send(AddRequest("late", [1], SamplingParams(), 0.0))  # goes nowhere, raises nothing
    finally:
        await engine.close()


async def test_a_start_up_mistake_comes_back_as_the_config_error_it_was() -> None:
    client = client_of("bad-config")
    with pytest.raises(ConfigError, match="no legs"):
        await client.start()
    await client.close()
    assert is_gone(client.pid)


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("broken", "ValueError: a bug"), ("dies", "exit code 7")]
)
async def test_an_engine_that_dies_at_start_says_why(behaviour: str, reason: str) -> None:
    client = client_of(behaviour)
    with pytest.raises(EngineDead, match=reason):
        await client.start()
    await client.close()
    assert is_gone(client.pid)


async def test_closing_while_the_engine_still_loads_ends_it() -> None:
    client = client_of()
    starting = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await client.close()
    assert is_gone(client.pid)


async def test_sec_48_a_process_shows_life_in_a_long_step_and_none_when_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STOP_WITHIN_S", 0.2)
    client = client_of("slow")
    await client.start()
    try:
        client.send(AddRequest("a", [1], SamplingParams(max_tokens=1), 0.0))
        began = client.seen_at()
        while client.seen_at() < began + HEARTBEAT_S:
            await asyncio.sleep(0.05)
        engine = psutil.Process(client.pid)
        engine.suspend()
        while engine.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # what it said before is taken in
        frozen = client.seen_at()
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert client.seen_at() == frozen
    finally:
        await client.close()


async def test_an_engine_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_WITHIN_S", 0.2)
    client = client_of("slow")
    await client.start()
    client.send(AddRequest("a", [1], SamplingParams(max_tokens=1), 0.0))
    await client.close()
    assert is_gone(client.pid)


async def test_signals_meant_for_the_whole_group_leave_the_engine_running() -> None:
    client = client_of()
    engine = AsyncEngine(client, served(), NoObserver())
    await engine.start()
    try:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert len(await answer(engine, [1, 2], 5)) == 5
    finally:
        await engine.close()


FRONT = """
import asyncio, os, sys
from tests.engine.process.test_process_client import client_of

async def main():
    client = client_of()
    await client.start()
    print(client.pid, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def test_no_engine_outlives_a_front_that_is_killed() -> None:
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert front.stdout is not None
    assert front.stdin is not None
    engine = psutil.Process(int(front.stdout.readline()))
    front.kill()
    front.wait()
    front.stdin.close()
    front.stdout.close()
    assert psutil.wait_procs([engine], timeout=30)[0] == [engine]
