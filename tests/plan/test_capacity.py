"""A plan's numbers against what loading the model and starting an engine really takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from serve.kernels import reference
from serve.kernels.cpu import cpu_kernels
from serve.kernels.stored import StoredMatrix
from serve.kv_cache.storage import block_bytes
from serve.models.registry import build_model
from serve.models.weights.checkpoint import open_checkpoint
from serve.models.weights.footprint import read_footprint
from serve.plan.capacity import Capacity, plan_capacity
from serve.plan.settings import PlanConfig
from serve.plan.suggestions import suggest
from serve.worker.model_runner import layer_shapes
from serve.worker.worker import Worker
from tests.tiny_models import FAMILIES, OTHERS, load, make_config, make_model, save_model

GIB = 2**30


def config(
    *, model: ModelConfig = ModelConfig(), device: str = "cpu", **cache: Any
) -> EngineConfig:
    return EngineConfig(
        model=model,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=8),
        device=DeviceConfig(device=device, attention_backend="reference"),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("model_type", [*FAMILIES, *OTHERS])
def test_blocks_are_those_the_engine_allocates(model_type: str, tmp_path: Path) -> None:
    save_model(tmp_path, model_type)
    engine = config(kv_cache_memory_bytes=Count(100_000), block_size=4)

    capacity = plan_capacity(engine, PlanConfig(memory=Count(4 * GIB)), tmp_path)
    worker = Worker(engine, tmp_path)

    assert capacity.cache is not None
    assert capacity.cache.num_blocks == worker.info.num_blocks
    assert capacity.cache.max_model_len == worker.info.max_model_len
    assert capacity.dtype == worker.info.dtype
    shapes = layer_shapes(load(tmp_path), reference.kernels(), block_size=4)
    assert capacity.block_bytes == block_bytes(shapes, torch.float32)


@pytest.mark.parametrize("model_type", [*FAMILIES, *OTHERS])
def test_parameters_and_weights_are_those_that_are_loaded(model_type: str, tmp_path: Path) -> None:
    theirs = save_model(tmp_path, model_type)
    checkpoint = open_checkpoint(tmp_path, "dummy")

    footprint = read_footprint(
        checkpoint,
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        is_packed=False,
        impl="auto",
    )

    named = dict(theirs.named_parameters())
    assert footprint.num_parameters == sum(p.numel() for p in named.values())
    norms = sum(p.numel() for name, p in named.items() if "norm" in name)
    if model_type in FAMILIES:  # our decoder keeps norms in fp32
        assert footprint.weight_bytes == 2 * footprint.num_parameters + 2 * norms
    else:
        assert footprint.weight_bytes == 2 * footprint.num_parameters
    ours = load(tmp_path)
    assert footprint.cache_layers == tuple(ours.cache_layers)
    assert footprint.max_position == ours.max_position


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_matrices_on_a_cpu_take_what_its_packer_takes(
    stored: torch.dtype, tied: bool, quantization: str | None, tmp_path: Path
) -> None:
    settings = {"vocab_size": 96, "tie_word_embeddings": tied}
    theirs = make_model(make_config("qwen2", **settings)).to(stored)
    theirs.save_pretrained(tmp_path)
    kernels, packed = cpu_kernels(num_threads=1, quantization=quantization), []

    def pack(parts: Sequence[StoredMatrix], bias: torch.Tensor | None) -> Any:
        packed.append(kernels.pack_linear(parts, bias))
        return packed[-1]

    checkpoint = open_checkpoint(tmp_path, "auto")
    build_model(
        checkpoint,
        kernels=replace(kernels, pack_linear=pack),
        dtype=torch.float32,
        device=torch.device("cpu"),
        impl="native",
        seed=0,
    )
    named = dict(theirs.named_parameters())
    others = 4 * sum(p.numel() for p in named.values() if p.ndim == 1)
    others += sum(p.nbytes for name, p in named.items() if "embed" in name)

    footprint = read_footprint(
        checkpoint,
        dtype=torch.float32,
        compute_dtype=torch.float32,
        is_packed=True,
        impl="auto",
        quantization=quantization,
    )

    assert footprint.weight_bytes == sum(linear.panels.data.nbytes for linear in packed) + others


def test_an_eight_bit_cache_takes_a_quarter_of_fp32s_and_the_engine_agrees(tmp_path: Path) -> None:
    save_model(tmp_path)
    sizes = {"kv_cache_memory_bytes": Count(100_000), "block_size": 4}
    options = PlanConfig(memory=Count(4 * GIB))

    plain = plan_capacity(config(**sizes), options, tmp_path)
    narrow = plan_capacity(config(**sizes, kv_cache_dtype="fp8"), options, tmp_path)
    worker = Worker(config(**sizes, kv_cache_dtype="fp8"), tmp_path)

    assert narrow.block_bytes * 4 == plain.block_bytes
    assert narrow.cache is not None
    assert narrow.cache.num_blocks == worker.info.num_blocks


def test_a_large_model_is_measured_without_its_memory(tmp_path: Path) -> None:
    """Llama 3.1 8B's published numbers."""
    large = make_config(
        "llama",
        hidden_size=4096,
        intermediate_size=14_336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=32,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        dtype=torch.bfloat16,
    )
    large.save_pretrained(tmp_path)

    capacity = plan_capacity(config(device="cuda"), PlanConfig(memory=Count("80GiB")), tmp_path)

    assert capacity.footprint.num_parameters == 8_030_261_248
    assert capacity.kv_bytes_per_token == 128 * 1024
    assert capacity.footprint.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert capacity.max_num_batched_tokens == 8192
    assert capacity.cache is not None
    spent = capacity.footprint.weight_bytes + capacity.step_bytes + capacity.context_bytes
    assert spent + capacity.cache.num_blocks * capacity.block_bytes <= 72 * GIB


def small(tmp_path: Path, memory: str, *, device: str = "cuda", **options: Any) -> Capacity:
    save_model(tmp_path, "gemma3_text")
    plan = PlanConfig(memory=Count(memory), **options)
    return plan_capacity(config(device=device, block_size=4), plan, tmp_path)


def test_requests_at_once_follow_from_whole_blocks(tmp_path: Path) -> None:
    capacity = small(tmp_path, "2GiB", lengths=(Count(1), Count(5), Count(64), Count(65)))
    assert capacity.cache is not None
    pool = capacity.cache.num_blocks
    assert [(fit.num_blocks, fit.num_requests) for fit in capacity.fits] == [
        (1, pool),
        (2, pool // 2),
        (16, pool // 16),
        (17, 0),  # longer than the model's context
    ]


def test_sliding_windows_are_told(tmp_path: Path) -> None:
    assert set(small(tmp_path, "2GiB").footprint.windows) == {4, None}


def test_a_model_that_does_not_fit_says_what_would_help(tmp_path: Path) -> None:
    capacity = small(tmp_path, "1MiB")
    assert capacity.cache is None
    assert capacity.needed_bytes > capacity.usable_bytes
    assert [s.flag for s in suggest(capacity)] == ["--dtype bfloat16"]


def test_fewer_requests_are_suggested_where_the_default_would_preempt(tmp_path: Path) -> None:
    save_model(tmp_path)
    engine = config(device="cuda", num_gpu_blocks_override=8, block_size=16)
    capacity = plan_capacity(engine, PlanConfig(memory=Count("2GiB")), tmp_path)
    assert [s.flag for s in suggest(capacity)] == ["--max-num-seqs 2"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_on_a_cpu_are_the_weights_alone(dtype: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    wide = plan_capacity(config(), PlanConfig(), tmp_path)
    narrow = plan_capacity(config(model=ModelConfig(dtype=dtype)), PlanConfig(), tmp_path)
    assert wide.footprint.weight_bytes / 2 < narrow.footprint.weight_bytes
    assert narrow.footprint.weight_bytes < wide.footprint.weight_bytes
    assert (narrow.dtype, narrow.block_bytes) == (dtype, wide.block_bytes)


def test_int8_is_planned_on_a_cpu_and_refused_where_the_engine_has_none(tmp_path: Path) -> None:
    save_model(tmp_path)
    model = ModelConfig(quantization="int8")
    with_reference = config(model=model)
    compiled = replace(with_reference, device=DeviceConfig(device="cpu", attention_backend="cpu"))

    capacity = plan_capacity(compiled, PlanConfig(), tmp_path)

    wide = plan_capacity(config(), PlanConfig(), tmp_path)
    assert capacity.dtype == "int8"
    assert capacity.footprint.weight_bytes < wide.footprint.weight_bytes / 2
    with pytest.raises(ConfigError, match="--quantization int8: only the cpu kernels"):
        plan_capacity(config(model=model, device="cuda"), PlanConfig(memory=Count("2G")), tmp_path)
    with pytest.raises(ConfigError, match="--quantization int8: only the cpu kernels"):
        plan_capacity(with_reference, PlanConfig(), tmp_path)
