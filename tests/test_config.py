"""Settings refuse values that can never work, and sizes read as people write them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.config import (
    CacheConfig,
    Count,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    api_keys_from_environment,
    cache_folder,
    let_idle_threads_sleep,
)
from serve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("8KiB", 8192),
        ("25.6k", 25_600),
        ("2GiB", 2 << 30),
        ("1.5G", 3 << 29),
        ("1t", 10**12),
        (" 12 ", 12),
    ],
)
def test_sizes_may_carry_a_decimal_or_binary_suffix(text: str, number: int) -> None:
    assert Count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "8kB", "8 k", "1e3", "0x10", "many", "8Q", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number such as"):
        Count(text)


def test_a_fraction_of_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        Count("1.5")


@given(st.integers(min_value=0, max_value=2**50))
def test_a_plain_number_reads_as_itself(number: int) -> None:
    assert Count(str(number)) == number == Count(number)


def test_context_length_is_auto_or_a_size() -> None:
    assert ModelConfig().max_model_len_tokens() is None
    assert ModelConfig(max_model_len="2K").max_model_len_tokens() == 2048


@pytest.mark.parametrize(
    ("build", "flag"),
    [
        (lambda: ModelConfig(max_model_len="long"), "--max-model-len"),
        (lambda: ModelConfig(max_model_len="0"), "--max-model-len"),
        (lambda: CacheConfig(block_size=0), "--block-size"),
        (lambda: CacheConfig(gpu_memory_utilization=0.0), "--gpu-memory-utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=1.1), "--gpu-memory-utilization"),
        (lambda: CacheConfig(gpu_memory_utilization=float("nan")), "--gpu-memory-utilization"),
        (lambda: CacheConfig(kv_cache_memory_bytes=Count(0)), "--kv-cache-memory-bytes"),
        (lambda: CacheConfig(num_gpu_blocks_override=0), "--num-gpu-blocks-override"),
        (lambda: CacheConfig(swap_space=-1.0), "--swap-space"),
        (lambda: SchedulerConfig(max_num_seqs=0), "--max-num-seqs"),
        (lambda: SchedulerConfig(max_num_batched_tokens=Count(0)), "--max-num-batched-tokens"),
        (lambda: SchedulerConfig(scheduler_delay_factor=-0.1), "--scheduler-delay-factor"),
        (lambda: DeviceConfig(cpu_threads=0), "--cpu-threads"),
        (lambda: ServerConfig(port=65536), "--port"),
        (lambda: ServerConfig(shutdown_timeout=-1.0), "--shutdown-timeout"),
        (lambda: ServerConfig(timeout_keep_alive=0), "--timeout-keep-alive"),
        (lambda: ServerConfig(timeout_receive=0), "--timeout-receive"),
        (lambda: ServerConfig(max_connections=0), "--max-connections"),
        (lambda: ServerConfig(engine_timeout=1), "--engine-timeout"),
        (lambda: ServerConfig(step_timeout=0), "--step-timeout"),
        (lambda: ServerConfig(metrics_prefix="9-"), "--metrics-prefix"),
    ],
)
def test_impossible_values_are_refused_by_their_flag(build, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        build()


def test_settings_cannot_be_changed_after_the_fact() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.cache.block_size = 32  # type: ignore[misc]


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_LLM_API_KEY", "one, two,,")
    assert api_keys_from_environment() == ("one", "two")
    monkeypatch.delenv("SERVE_LLM_API_KEY")
    assert api_keys_from_environment() == ()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_LLM_CACHE", "/models")
    assert cache_folder() == Path("/models")
    monkeypatch.delenv("SERVE_LLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/serve-llm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "serve-llm"


@pytest.mark.parametrize(
    ("already", "spins"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_sec_47_idle_openmp_threads_sleep_unless_someone_said_how_they_wait(
    monkeypatch: pytest.MonkeyPatch, already: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in already.items():
        monkeypatch.setenv(name, value)
    let_idle_threads_sleep()
    set_to = os.environ.get("GOMP_SPINCOUNT")
    os.environ.pop("GOMP_SPINCOUNT", None)
    assert set_to == spins


def test_sec_47_the_config_comes_without_torch_which_reads_the_setting_when_loaded() -> None:
    code = "import serve.engine, serve.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_speculation_needs_known_tokens() -> None:
    text = '{"method": "ngram"}'
    assert SchedulerConfig().speculation() is None
    found = SchedulerConfig(speculative_config=text).speculation()
    assert found is not None
    assert found.method == "ngram"
    with pytest.raises(ConfigError, match="--async-scheduling"):
        SchedulerConfig(speculative_config=text, async_scheduling="on")
    with pytest.raises(ConfigError, match="'k'"):
        SchedulerConfig(speculative_config='{"method": "ngram", "k": 3}')
