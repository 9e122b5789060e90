"""The worker from a checkpoint on disk to its first tokens."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from serve.config import (
    CacheConfig,
    Count,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from serve.errors import ConfigError
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData
from serve.worker import worker
from serve.worker.device.cpu_device import CpuDevice
from serve.worker.executor import TokenMask
from serve.worker.local_executor import LocalExecutor
from serve.worker.sampling.sampler import Sampler
from serve.worker.startup import loading
from serve.worker.startup.loading import model_impl
from serve.worker.startup.trial_steps import largest_plan
from tests.e2e.tiny_model import save_tiny_model
from tests.worker.harness import plan, share

MAX_MODEL_LEN = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_model_len=MAX_MODEL_LEN)


def config(
    *,
    cache: CacheConfig = CacheConfig(),
    scheduler: SchedulerConfig = SchedulerConfig(),
    quantization: Literal["int8"] | None = None,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(quantization=quantization),
        cache=cache,
        scheduler=scheduler,
        device=DeviceConfig(device="cpu", attention_backend="reference"),
    )


def test_sch_26_a_cpu_only_start_sizes_its_pool_and_answers(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = LocalExecutor(config(scheduler=SchedulerConfig(max_num_seqs=3)), model)
    with caplog.at_level(logging.INFO):
        info = executor.start()
    assert info.num_blocks == 3 * MAX_MODEL_LEN // 16  # memory is plenty for so small a model
    assert info.num_host_blocks == 0
    assert info.max_model_len == MAX_MODEL_LEN
    assert info.max_num_batched_tokens == 256
    assert (info.device, info.dtype, info.attention_backend) == ("cpu", "float32", "reference")

    prompt = [5, 6, 7]
    greedy = SamplingParams(temperature=0.0)
    step = plan([share("a", 0, prompt)], admitted=[RowData("a", greedy, prompt, 3, [1])])
    (token,) = executor.forward(step).sample(None).wait().token_ids["a"]
    assert 0 <= token < info.vocab_size
    executor.close()

    log = caplog.text
    assert f"model {model.name}, in float32 on cpu (" in log
    assert "attention: reference kernels, because --attention-backend asks for them" in log
    assert "KV pool: 96 blocks of 16 tokens = 1536 tokens" in log
    assert "3.0 requests of the greatest length (512 tokens) fit at once" in log


def test_a_mode_that_swaps_gets_a_host_tier(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(
        cache=CacheConfig(num_gpu_blocks_override=10, swap_space=0.001),
        scheduler=SchedulerConfig(preemption_mode="swap"),
    )
    with caplog.at_level(logging.INFO):
        info = LocalExecutor(settings, model).start()
    assert info.num_blocks == 10
    assert info.max_model_len == 160
    # 2 layers of keys and values, 2 heads of 16 float32 numbers, 16 tokens.
    assert info.num_host_blocks == int(0.001 * 2**30) // (2 * 2 * 2 * 16 * 4 * 16) - 1
    assert f"swap space: {info.num_host_blocks} blocks" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(quantization="int8"), "--quantization int8: only the cpu kernels"),
        (config(cache=CacheConfig(kv_cache_memory_bytes=Count(100))), "--kv-cache-memory-bytes"),
        (
            config(cache=CacheConfig(num_gpu_blocks_override=2**40)),
            "--num-gpu-blocks-override",
        ),
    ],
)
def test_what_cannot_work_ends_the_start_with_the_flags_name(
    model: Path, settings: EngineConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalExecutor(settings, model).start()


def test_batch_invariant_serving_takes_our_decoder_and_refuses_another(model: Path) -> None:
    settings = replace(
        config(),
        device=DeviceConfig(device="cpu", attention_backend="reference", batch_invariant=True),
    )
    assert model_impl(config()) == "auto"
    assert model_impl(settings) == "native"
    other = replace(settings, model=ModelConfig(model_impl="transformers"))
    with pytest.raises(ConfigError, match="--batch-invariant: --model-impl transformers"):
        LocalExecutor(other, model).start()


def test_the_largest_step_fills_the_budget_with_as_many_requests_as_may_run() -> None:
    step = largest_plan(2048, max_num_seqs=256, max_model_len=1000, block_size=16)
    lengths = [entry.num_tokens for entry in step.scheduled]
    assert sum(lengths) == step.num_scheduled_tokens == 2048
    assert len(lengths) == 256
    assert lengths[:2] == [1000, 794]
    assert all(entry.num_samples for entry in step.scheduled)
    assert all(set(row.block_ids) == {0} for row in step.admitted)


@pytest.mark.parametrize(("budget", "total"), [(4, 4), (10**6, 8 * 100)])
def test_the_largest_step_never_exceeds_requests_or_budget(budget: int, total: int) -> None:
    step = largest_plan(budget, max_num_seqs=8, max_model_len=100, block_size=16)
    assert step.num_scheduled_tokens == sum(e.num_tokens for e in step.scheduled) == total
    assert max(e.num_tokens for e in step.scheduled) <= 100


def test_the_largest_step_runs_with_a_null_block_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA start measures: the trial step must not need a pool."""
    ran = []

    def measure(self: CpuDevice, share: float | None, run_largest_step) -> int:  # type: ignore[no-untyped-def]
        run_largest_step()
        ran.append(share)
        return 100_000

    monkeypatch.setattr(CpuDevice, "cache_bytes", measure)
    settings = config(scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=Count(64)))
    info = LocalExecutor(settings, model).start()
    assert ran == [None]
    assert info.num_blocks == 100_000 // (2 * 2 * 2 * 16 * 4 * 16) - 1


def test_where_kernels_are_compiled_the_mask_is_launched_before_serving(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, sample, masks = worker.load_model, Sampler.sample, list[TokenMask | None]()

    def load_compiled(*arguments: Any) -> Any:
        loaded = load(*arguments)
        return replace(loaded, kernels=replace(loaded.kernels, compiling=nullcontext))

    def watched(self: Sampler, *arguments: Any) -> Any:
        masks.append(arguments[-1])
        return sample(self, *arguments)

    monkeypatch.setattr(worker, "load_model", load_compiled)
    monkeypatch.setattr(Sampler, "sample", watched)
    LocalExecutor(config(), model).start()
    assert any(mask is not None and (mask.bits == -1).all() for mask in masks)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 2**22, "hidden_size": 2**16},
        {"intermediate_size": 2**24, "hidden_size": 2**16},
        {"num_hidden_layers": 2**10, "hidden_size": 2**16},
        {"max_position_embeddings": 2**31},
    ],
)
@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_sec_49_a_model_larger_than_the_memory_is_told_before_it_is_built(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    impl: Literal["native", "transformers"],
    sizes: dict[str, int],
    load_format: Literal["auto", "dummy"],
) -> None:
    if impl == "transformers" and "max_position_embeddings" in sizes:
        pytest.skip("their tables are no longer than the positions of a step")
    values = json.loads((model / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    monkeypatch.setattr(loading, "build_model", None)  # it is not reached
    settings = replace(config(), model=ModelConfig(load_format=load_format, model_impl=impl))
    with pytest.raises(
        ConfigError, match=r"config\.json: the model does not fit on cpu \("
    ) as caught:
        LocalExecutor(settings, tmp_path).start()
    for name, size in sizes.items():
        assert f"{name} {size}" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("build_model", r"the model does not fit on cpu \(.*narrower --dtype"),
        ("largest_plan", r"the largest step does not fit .*--max-num-batched-tokens"),
        ("KVStorage", r"a KV pool of \d+ blocks does not fit .*--gpu-memory-utilization"),
    ],
)
def test_no_memory_at_start_is_told_with_figures_and_flags(
    model: Path, monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    def no_memory(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    def measure(self: CpuDevice, share: float | None, run_largest_step) -> int:  # type: ignore[no-untyped-def]
        run_largest_step()
        return 100_000

    if where == "largest_plan":
        monkeypatch.setattr(CpuDevice, "cache_bytes", measure)
    monkeypatch.setattr(loading if where == "build_model" else worker, where, no_memory)
    with pytest.raises(ConfigError, match=message):
        LocalExecutor(config(), model).start()


def test_a_config_alone_serves_with_dummy_weights(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    settings = replace(config(), model=ModelConfig(load_format="dummy"))
    executor = LocalExecutor(settings, tmp_path)
    info = executor.start()
    greedy = SamplingParams(temperature=0.0)
    step = plan([share("a", 0, [5, 6])], admitted=[RowData("a", greedy, [5, 6], 2, [1])])
    (token,) = executor.forward(step).sample(None).wait().token_ids["a"]
    assert 0 <= token < info.vocab_size


@pytest.mark.parametrize(
    ("wanted", "calculated", "told"),
    [("fp8", False, "scales 1, because"), ("fp8_e4m3", True, "scales measured for every KV head")],
)
def test_an_eight_bit_cache_takes_a_quarter_of_fp32s_blocks_and_says_where_its_scales_come_from(
    model: Path, caplog: pytest.LogCaptureFixture, wanted: str, calculated: bool, told: str
) -> None:
    cache = CacheConfig(
        kv_cache_dtype=wanted,  # type: ignore[arg-type]
        calculate_kv_scales=calculated,
        kv_cache_memory_bytes=Count(200_000),
    )
    plain = LocalExecutor(
        config(cache=CacheConfig(kv_cache_memory_bytes=Count(200_000))), model
    ).start()
    executor = LocalExecutor(config(cache=cache), model)
    with caplog.at_level(logging.INFO):
        info = executor.start()
    assert (info.num_blocks + 1) // 4 == plain.num_blocks + 1
    assert info.block_bytes * 4 == plain.block_bytes
    assert f"KV cache in e4m3, with {told}" in caplog.text

    prompt = [5, 6, 7]
    greedy = SamplingParams(temperature=0.0)
    step = plan([share("a", 0, prompt)], admitted=[RowData("a", greedy, prompt, 3, [1])])
    (token,) = executor.forward(step).sample(None).wait().token_ids["a"]
    assert 0 <= token < info.vocab_size


def test_the_cpu_kernels_cannot_serve_an_eight_bit_cache(model: Path) -> None:
    settings = replace(
        config(cache=CacheConfig(kv_cache_dtype="fp8")),
        device=DeviceConfig(device="cpu", attention_backend="cpu"),
    )
    with pytest.raises(ConfigError, match=r"the cpu kernels .*--kv-cache-dtype"):
        LocalExecutor(settings, model).start()


def test_a_closed_executor_gives_its_memory_back_without_the_collector(model: Path) -> None:
    """A second engine in the process would otherwise find a full device."""
    executor = LocalExecutor(config(), model)
    gc.collect()
    gc.disable()
    try:
        executor.start()
        made = executor._worker
        assert made is not None
        left = [weakref.ref(part) for part in (made, made.runner, made.block_file)]
        del made
        executor.close()
        assert [ref() for ref in left] == [None] * 3
    finally:
        gc.enable()
    executor.close()  # of no effect
