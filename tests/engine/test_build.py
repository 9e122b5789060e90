"""Config and executor → a core whose parts agree."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

import pytest

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.engine.build import core_over
from serve.errors import ConfigError
from serve.scheduler.limits import SETTINGS, SchedulerLimits, as_limit
from tests.fakes import VOCAB_SIZE, FakeExecutor, FakeInbox, FakeOutbox


def test_what_the_worker_measured_sizes_the_rest() -> None:
    executor = FakeExecutor(10, 8, num_host_blocks=3, max_num_batched_tokens=32)
    config = EngineConfig(
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(
            max_num_seqs=5, preemption_mode="swap", scheduler_delay_factor=0.5
        ),
    )
    core, ready = core_over(executor, config, FakeInbox(), FakeOutbox())
    limits, kv = core.scheduler.limits, core.scheduler.kv
    assert (kv.num_blocks, kv.block_size) == (ready.num_blocks, ready.block_size) == (10, 8)
    assert ready.num_host_blocks == 3
    assert ready.vocab_size == VOCAB_SIZE
    assert limits.max_num_batched_tokens == ready.max_num_batched_tokens == 32
    assert limits.max_num_seqs == ready.max_num_seqs == 5
    assert limits.max_model_len == ready.max_model_len == 80
    assert (limits.preemption_mode, limits.delay_factor) == ("swap", 0.5)
    assert core.executor is executor


def test_every_limit_is_a_setting_or_follows_from_the_model_and_defaults_agree() -> None:
    names = {as_limit(setting, None)[0] for setting in SETTINGS}
    assert {f.name for f in fields(SchedulerLimits)} == names | {"max_model_len"}
    sizes = {"max_num_batched_tokens": 64, "max_model_len": 32}
    untouched = SchedulerConfig()
    assert SchedulerLimits.of(untouched, **sizes) == SchedulerLimits(
        max_num_seqs=untouched.max_num_seqs, **sizes
    )
    assert SchedulerLimits.of(SchedulerConfig(target_itl_ms=50), **sizes).target_itl_s == 0.05


def test_whole_prompts_that_cannot_fit_a_step_are_a_config_error_with_the_flag() -> None:
    executor = FakeExecutor(10, 8, max_num_batched_tokens=32)
    config = EngineConfig(
        cache=CacheConfig(block_size=8), scheduler=SchedulerConfig(enable_chunked_prefill=False)
    )
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        core_over(executor, config, FakeInbox(), FakeOutbox())
    assert executor.closed


@pytest.mark.parametrize(("asked", "depth"), [("auto", 3), ("on", 2), ("off", 1)])
def test_as_many_steps_are_out_as_was_asked_for_or_else_as_suits_the_device(
    asked: Literal["auto", "on", "off"], depth: int
) -> None:
    executor = FakeExecutor(10, 8, max_num_batched_tokens=32)
    executor.start = lambda start=executor.start: replace(start(), depth=3)  # type: ignore[method-assign]
    config = EngineConfig(
        cache=CacheConfig(block_size=8), scheduler=SchedulerConfig(async_scheduling=asked)
    )
    core, _ = core_over(executor, config, FakeInbox(), FakeOutbox())
    assert core.depth == depth
