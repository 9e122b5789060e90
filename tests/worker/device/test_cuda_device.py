"""The CUDA device on a real GPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve.config import DeviceConfig
from serve.worker.device.cuda_device import is_available
from serve.worker.device.find_device import find_device
from serve.worker.device.kinds import GIB

needs_cuda = pytest.mark.skipif(not is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
def test_copies_to_and_from_a_gpu_are_complete_when_waited_for() -> None:
    device = find_device(DeviceConfig())
    assert device.kind.name == "cuda"
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


@pytest.mark.gpu
@needs_cuda
def test_a_steps_numbers_are_the_ones_it_sent_though_the_host_runs_ahead() -> None:
    device = find_device(DeviceConfig())
    uploads = device.uploads(1 << 20)
    sums = []
    for step in range(20):
        uploads.begin()
        (numbers,) = uploads.send(np.full(50_000, step))
        sums.append(device.to_host(numbers.sum()))
    assert [copy.wait().item() for copy in sums] == [50_000 * step for step in range(20)]
