"""The engine core driven from the caller's own event loop."""

from __future__ import annotations

import asyncio

import pytest

from serve.errors import ConfigError, EngineDead
from serve.messages import EngineReady, FinishReason
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import inline_engine


async def test_nothing_steps_while_nobody_waits_for_anything() -> None:
    inline = inline_engine()
    engine = await inline.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert inline.executor.step_sizes == []
    outputs = [out async for out in engine.generate([1, 2, 3], SamplingParams(max_tokens=2))]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert inline.executor.step_sizes == [3, 1]
    await engine.close()
    assert inline.executor.closed


async def test_a_core_that_gives_up_is_a_dead_engine() -> None:
    inline = inline_engine()
    inline.executor.fail_on = lambda number, plan: True
    engine = await inline.start()
    for _ in range(3):
        outputs = [out async for out in engine.generate([1], SamplingParams(max_tokens=2))]
        assert outputs[-1].finish_reason is FinishReason.ERROR
    assert "in a row" in await engine.wait_dead()
    with pytest.raises(EngineDead, match="in a row"):
        [out async for out in engine.generate([1], SamplingParams(max_tokens=2))]
    await engine.close()


async def test_closing_ends_the_requests_that_run() -> None:
    inline = inline_engine()
    engine = await inline.start()
    outputs = engine.generate([1], SamplingParams(max_tokens=50))
    await anext(outputs)
    await engine.close()
    with pytest.raises(EngineDead):
        [out async for out in outputs]


async def test_what_building_raises_comes_out_of_start(monkeypatch: pytest.MonkeyPatch) -> None:
    inline = inline_engine()

    def refuse(*_: object) -> tuple[object, EngineReady]:
        raise ConfigError("no such device")

    monkeypatch.setattr(inline, "_build", refuse)
    with pytest.raises(ConfigError, match="no such device"):
        await inline.start()
    await inline.engine.close()
