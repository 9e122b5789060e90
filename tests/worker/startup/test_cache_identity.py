"""The identity changes with whatever may change an output's bits, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from serve.worker.executor import WorkerInfo
from serve.worker.startup import cache_identity
from serve.worker.worker import Worker
from tests.e2e.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_model_len=128)


def info(folder: Path, **settings: Any) -> WorkerInfo:
    """Of a worker with this model; settings by the part of the config that has them."""
    parts: dict[str, Any] = {
        "model": ModelConfig(str(folder), **settings.get("model", {})),
        "cache": CacheConfig(**{"num_gpu_blocks_override": 16, **settings.get("cache", {})}),
        "device": DeviceConfig(**{"device": "cpu", "cpu_threads": 1, **settings.get("device", {})}),
        "scheduler": SchedulerConfig(**{"max_num_seqs": 2, **settings.get("scheduler", {})}),
    }
    return Worker(EngineConfig(**parts), folder).info


def identity(folder: Path, **settings: Any) -> str:
    return info(folder, **settings).identity


@pytest.fixture(scope="module")
def plain(model: Path) -> str:
    return identity(model)


def test_the_same_bits_have_one_identity(model: Path, plain: str, tmp_path: Path) -> None:
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    same = {
        "model": {"dtype": "float32", "max_model_len": "64"},
        "cache": {"num_gpu_blocks_override": 20},
        "device": {"cpu_threads": 2, "attention_backend": "cpu"},
        "scheduler": {"max_num_seqs": 3, "preemption_mode": "swap"},
    }
    assert identity(moved, **same) == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"dtype": "float16"}},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"quantization": "int8"}},
        {"model": {"seed": 1}},
        {"model": {"model_impl": "transformers"}},
        {"model": {"load_format": "dummy"}},
        {"device": {"attention_backend": "reference"}},
    ],
    ids=str,
)
def test_other_formats_and_other_kernels_have_another(
    model: Path, plain: str, settings: dict[str, Any]
) -> None:
    assert identity(model, **settings) != plain


def test_so_have_other_threads_and_another_cache_dtype_where_torch_multiplies(model: Path) -> None:
    reference = {"attention_backend": "reference"}
    changes: list[dict[str, Any]] = [
        {"device": reference},
        {"device": {**reference, "cpu_threads": 2}},
        {"device": reference, "cache": {"kv_cache_dtype": "fp8"}},
    ]
    assert len({identity(model, **change) for change in changes}) == len(changes)


def flip_a_bit_in_the_middle(model: Path) -> None:
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def widen_the_norms(model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


@pytest.mark.parametrize("change", [flip_a_bit_in_the_middle, widen_the_norms])
def test_so_has_another_model(
    model: Path, plain: str, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    change(other)
    assert identity(other) != plain


def test_so_has_another_version_of_ours(
    model: Path, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_identity, "__version__", "999")
    assert identity(model) != plain


def test_large_files_are_sampled_all_over(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(40 << 20)
    samples = cache_identity._samples(file)
    assert sum(map(len, samples)) == 3 << 20
    assert all(samples)


def test_the_caches_dtype_is_told_and_not_the_weights(model: Path) -> None:
    found = info(model, model={"dtype": "float16"})
    assert (found.dtype, found.cache_dtype) == ("float16", "float32")
