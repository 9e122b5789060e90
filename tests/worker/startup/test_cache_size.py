from __future__ import annotations

import logging
from typing import Any

import pytest

from serve.config import CacheConfig, Count, EngineConfig, ModelConfig, SchedulerConfig
from serve.errors import ConfigError
from serve.worker.startup.cache_size import GIB, CacheSize, size_cache, token_budget

BLOCK_BYTES = 1000


def size(
    *,
    max_model_len: str = "auto",
    measured: int = 10**6,
    free: int = 10**9,
    host: int = 100 * GIB,
    model_max_len: int = 4096,
    scheduler: SchedulerConfig = SchedulerConfig(),
    **cache: Any,
) -> CacheSize:
    config = EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        cache=CacheConfig(**cache),
        scheduler=scheduler,
    )
    return size_cache(
        config,
        block_bytes=BLOCK_BYTES,
        model_max_len=model_max_len,
        device_free_bytes=free,
        host_total_bytes=host,
        measure_cache_bytes=lambda: measured,
    )


def test_an_exact_number_of_blocks_beats_bytes_which_beat_what_was_measured() -> None:
    both = {"num_gpu_blocks_override": 77, "kv_cache_memory_bytes": Count(50_000)}
    assert size(**both).num_blocks == 77
    del both["num_gpu_blocks_override"]
    assert size(**both).num_blocks == 49  # the null block is one of the fifty
    assert size(measured=30_000).num_blocks == 29


def test_the_measured_pool_is_no_larger_than_all_requests_at_full_length_need() -> None:
    few = SchedulerConfig(max_num_seqs=2)
    assert size(measured=10**9, model_max_len=100, scheduler=few).num_blocks == 2 * 7


def test_auto_length_is_the_models_or_what_the_pool_holds() -> None:
    assert size(measured=10**6).max_model_len == 4096
    assert size(num_gpu_blocks_override=10).max_model_len == 160


@pytest.mark.parametrize(("asked", "tokens"), [("1000", 1000), ("2k", 2000), ("2K", 2048)])
def test_a_length_that_fits_is_taken_as_asked(asked: str, tokens: int) -> None:
    assert size(max_model_len=asked).max_model_len == tokens


def test_a_length_beyond_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 5000 .* 4096 tokens"):
        size(max_model_len="5000")


def test_a_length_beyond_the_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 1000: .* 160 tokens"):
        size(max_model_len="1000", num_gpu_blocks_override=10)


@pytest.mark.parametrize("settings", [{"measured": -5}, {"kv_cache_memory_bytes": Count(1999)}])
def test_no_room_for_a_block_is_a_start_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no room for even one KV block"):
        size(**settings)


def test_a_pool_that_memory_cannot_hold_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override: .* GiB are free"):
        size(num_gpu_blocks_override=10**6, free=10**8)


def test_host_blocks_exist_only_when_the_mode_can_swap() -> None:
    for mode, blocks in (("recompute", 0), ("swap", 2 * GIB // 1000 - 1), ("auto", None)):
        scheduler = SchedulerConfig(preemption_mode=mode)  # type: ignore[arg-type]
        got = size(scheduler=scheduler, swap_space=2.0).num_host_blocks
        assert got == (2 * GIB // 1000 - 1 if blocks is None else blocks)


def test_swap_space_beyond_most_of_the_hosts_memory_is_refused_and_much_of_it_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swap = SchedulerConfig(preemption_mode="swap")
    with pytest.raises(ConfigError, match=r"--swap-space 7.5 is 75% of this machine's 10.0 GiB"):
        size(scheduler=swap, swap_space=7.5, host=10 * GIB)
    with caplog.at_level(logging.WARNING):
        size(scheduler=swap, swap_space=3.0, host=10 * GIB)
        assert not caplog.records
        size(scheduler=swap, swap_space=5.0, host=10 * GIB)
    assert "50%" in caplog.text
    # In a mode that never swaps the figure means nothing.
    size(swap_space=7.5, host=10 * GIB)


def test_swap_mode_without_swap_space_is_refused_but_auto_recomputes() -> None:
    with pytest.raises(ConfigError, match="--swap-space 0"):
        size(scheduler=SchedulerConfig(preemption_mode="swap"), swap_space=0.0)
    auto = SchedulerConfig(preemption_mode="auto")
    assert size(scheduler=auto, swap_space=0.0).num_host_blocks == 0


def test_the_token_budget_is_as_asked_or_the_devices_and_covers_whole_prompts() -> None:
    assert token_budget(SchedulerConfig(), 2048, 8192) == 2048
    assert token_budget(SchedulerConfig(max_num_seqs=300), 256, 8192) == 300
    assert token_budget(SchedulerConfig(max_num_batched_tokens=Count(7)), 2048, 8192) == 7
    whole = SchedulerConfig(enable_chunked_prefill=False)
    assert token_budget(whole, 2048, 8192) == 8192
    assert token_budget(whole, 2048, 100) == 2048
    exact = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=Count(8192))
    assert token_budget(exact, 2048, 8192) == 8192


def test_whole_prompts_that_do_not_fit_a_step_are_refused_with_both_numbers() -> None:
    config = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=Count(4000))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 4000 .* 8192"):
        token_budget(config, 2048, 8192)
