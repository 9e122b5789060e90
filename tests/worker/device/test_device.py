from __future__ import annotations

import logging

import pytest
import torch

from serve.config import DeviceConfig
from serve.errors import ConfigError
from serve.worker.device import host_memory
from serve.worker.device.cpu_device import CpuDevice
from serve.worker.device.find_device import find_device
from serve.worker.device.kinds import CUDA, GIB, KINDS, DeviceKind

needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")


@pytest.fixture(autouse=True)
def _same_threads_afterwards():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_none
def test_auto_finds_the_cpu_and_cuda_is_refused_with_what_to_do() -> None:
    assert find_device(DeviceConfig()).kind.name == "cpu"
    with pytest.raises(ConfigError, match=r"--device cuda: .* --device cpu"):
        find_device(DeviceConfig(device="cuda"))


def test_the_thread_count_is_set_or_one_per_core() -> None:
    assert find_device(DeviceConfig(device="cpu", cpu_threads=3)).num_threads == 3
    assert torch.get_num_threads() == 3
    assert CpuDevice().num_threads == host_memory.usable_cores() == torch.get_num_threads()
    assert "1 thread," in CpuDevice(1).describe()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_mdl_03_auto_is_float32_on_a_cpu_whatever_the_checkpoint_and_says_so(
    stored: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert CpuDevice(1).resolve_dtype("auto", stored) is torch.float32
    told = [r.message for r in caplog.records]
    name = str(stored).removeprefix("torch.")
    assert told == (
        [] if stored is torch.float32 else [f"the checkpoint is {name}; a CPU serves it in float32"]
    )


def test_mdl_03_on_a_cpu_explicit_dtypes_are_of_the_weights_and_arithmetic_is_float32() -> None:
    cpu = CpuDevice(1)
    for name in ("float32", "bfloat16", "float16"):
        weights = cpu.resolve_dtype(name, torch.float32)
        assert str(weights) == f"torch.{name}"
        assert cpu.kind.compute_dtype(weights) is torch.float32


@pytest.mark.parametrize(("available", "pool"), [(8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB), (0, 0)])
def test_sch_26_the_cpu_pool_is_a_modest_part_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, available: int, pool: int
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)

    def never() -> None:
        raise AssertionError("a CPU needs no trial step")

    assert CpuDevice(1).cache_bytes(None, never) == pool


def test_a_share_of_memory_that_is_asked_for_governs_the_cpu_pool_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 6 * GIB)
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 10 * GIB)
    assert CpuDevice(1).cache_bytes(0.5, lambda: None) == GIB  # 4 of 10 GiB are in use
    assert CpuDevice(1).cache_bytes(0.3, lambda: None) < 0


def test_on_a_cpu_tensors_stay_where_they_are() -> None:
    cpu = CpuDevice(1)
    tensor = torch.arange(3)
    assert cpu.to_device(tensor) is tensor
    assert cpu.to_host(tensor).wait().tolist() == [0, 1, 2]
    assert cpu.allocate_host((2, 3), torch.bfloat16).shape == (2, 3)
    zeros = cpu.allocate_zeros((2, 3), torch.bfloat16)
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16))
    cpu.synchronize()
    mark = cpu.make_mark()
    mark.set()
    mark.wait()


def test_results_on_their_way_are_not_what_the_next_step_writes() -> None:
    tensor = torch.arange(3)
    copy = CpuDevice(1).to_host(tensor)
    tensor.fill_(9)
    assert copy.wait().tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_pool_fills_the_share_that_was_asked_for_on_every_kind_of_device(
    kind: DeviceKind,
) -> None:
    used = 3 * GIB
    pool = kind.pool_bytes(10 * GIB - used, 10 * GIB, 0.5)
    assert used + pool == kind.usable_bytes(10 * GIB, 0.5) == 5 * GIB


def test_a_gpu_lends_nine_tenths_and_a_large_one_has_larger_steps() -> None:
    assert CUDA.pool_bytes(9 * GIB, 10 * GIB, None) == 8 * GIB
    assert [CUDA.token_budget(size * GIB) for size in (1, 69, 70, 139)] == [2048, 2048, 8192, 8192]
    assert CUDA.compute_dtype(torch.bfloat16) is torch.bfloat16
