from __future__ import annotations

import logging

import pytest
import torch

from serve.config import DeviceConfig
from serve.errors import ConfigError
from serve.worker import host_memory
from serve.worker.device import GIB, CpuDevice, find_device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")


@pytest.fixture(autouse=True)
def _same_threads_afterwards():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_none
def test_auto_finds_the_cpu_and_cuda_is_refused_with_what_to_do() -> None:
    assert find_device(DeviceConfig()).name == "cpu"
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


def test_mdl_03_explicit_dtypes_work_with_a_warning_or_are_refused_clearly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpu = CpuDevice(1)
    assert cpu.resolve_dtype("float32", torch.float16) is torch.float32
    assert not caplog.records
    assert cpu.resolve_dtype("bfloat16", torch.float32) is torch.bfloat16
    assert caplog.records[0].levelno == logging.WARNING
    with pytest.raises(ConfigError, match=r"--dtype float16 .* Use --dtype float32"):
        cpu.resolve_dtype("float16", torch.float16)


@pytest.mark.parametrize(("available", "pool"), [(8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB), (0, 0)])
def test_sch_26_the_cpu_pool_is_a_modest_part_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, available: int, pool: int
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available)

    def never() -> None:
        raise AssertionError("a CPU needs no trial step")

    assert CpuDevice(1).cache_bytes(0.9, never) == pool


def test_on_a_cpu_tensors_stay_where_they_are() -> None:
    cpu = CpuDevice(1)
    tensor = torch.arange(3)
    assert cpu.to_device(tensor) is tensor
    assert cpu.to_host(tensor).wait().tolist() == [0, 1, 2]
    assert cpu.allocate_host((2, 3), torch.bfloat16).shape == (2, 3)
    zeros = cpu.allocate_zeros((2, 3), torch.bfloat16)
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16))
    cpu.synchronize()


@pytest.mark.gpu
@needs_cuda
def test_copies_to_and_from_a_gpu_are_complete_when_waited_for() -> None:
    device = find_device(DeviceConfig())
    assert device.name == "cuda"
    host = device.allocate_host((1000,), torch.float32).copy_(torch.arange(1000.0))
    assert host.is_pinned()
    on_device = device.to_device(host.clone())
    copies = [device.to_host(on_device * factor) for factor in range(5)]
    for factor, copy in enumerate(copies):
        assert torch.equal(copy.wait(), torch.arange(1000.0) * factor)


@pytest.mark.gpu
@needs_cuda
def test_a_gpus_pool_leaves_room_for_the_largest_step() -> None:
    device = find_device(DeviceConfig())
    hungry = device.cache_bytes(0.5, lambda: torch.empty(GIB, device="cuda", dtype=torch.uint8))
    modest = device.cache_bytes(0.5, lambda: None)
    assert modest - hungry == pytest.approx(GIB, rel=0.01)
    assert 0 < modest < device.free_bytes()
