"""What the CUDA device asks of CUDA, seen through a stand-in for torch.cuda: no GPU is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.worker.device import cuda_device
from serve.worker.device.kinds import GIB


class FakeCuda:
    """Notes the streams that are made and used, and what host memory is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[SimpleNamespace] = []
        self.worked_on: list[object] = []
        self.registered: dict[int, int] = {}
        self.register_result = 0
        current = SimpleNamespace(wait_stream=lambda stream: None)
        for name, stand_in in {
            "Stream": self._make_stream,
            "stream": self._use,
            "current_stream": lambda: current,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": SimpleNamespace,
            "graph": lambda graph, pool, stream: self._use(stream),
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop
            ),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _make_stream(self) -> SimpleNamespace:
        self.streams.append(SimpleNamespace(wait_stream=lambda stream: None))
        return self.streams[-1]

    @contextmanager
    def _use(self, stream: object) -> Iterator[None]:
        self.worked_on.append(stream)
        yield

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if not self.register_result:
            self.registered[address] = num_bytes
        return self.register_result


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def shown_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """GPUs of these generations, the first of which is current."""
    major, minor = capabilities[0]
    properties = SimpleNamespace(
        name="Tesla T4", major=major, minor=minor, total_memory=15 * GIB, multi_processor_count=40
    )
    for name, stand_in in {
        "current_device": lambda: 0,
        "device_count": lambda: len(capabilities),
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (14 * GIB, 15 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def bare_device() -> Any:
    """A CudaDevice that was never shown a GPU."""
    device = object.__new__(cuda_device.CudaDevice)
    device.synchronize = lambda: None  # type: ignore[method-assign]
    return device


def test_a_recorder_does_everything_on_one_stream_of_its_own(cuda: FakeCuda) -> None:
    first, second = (bare_device().graph_recorder() for _ in range(2))
    for _ in range(35):
        first.capture(lambda: Tensor())
    assert len(cuda.streams) == 2, "one each"
    assert all(stream is cuda.streams[0] for stream in cuda.worked_on)
    second.capture(lambda: Tensor())
    assert cuda.worked_on[-2:] == [cuda.streams[1]] * 2, "warm-up and recording"


def test_pinned_memory_is_as_large_as_asked_and_unlocked_with_its_last_view(cuda: FakeCuda) -> None:
    pinned = bare_device().allocate_host((3, 5, 1001), torch.bfloat16)
    assert list(cuda.registered.items()) == [(pinned.data_ptr(), 3 * 5 * 1001 * 2)]
    layer = pinned[1].fill_(7)
    del pinned
    assert cuda.registered, "a view is left"
    assert layer.float().sum() == 7 * 5 * 1001
    del layer
    assert not cuda.registered


def test_a_gpu_that_is_too_old_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown_gpus(monkeypatch, (7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5, and 8\.0 .*cpu"):
        cuda_device.CudaDevice()


@pytest.mark.parametrize("count", [1, 3])
def test_other_gpus_are_told_of_with_the_way_to_choose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    shown_gpus(monkeypatch, *[(9, 0)] * count)
    with caplog.at_level(logging.INFO):
        device = cuda_device.CudaDevice()
    told = "3 GPUs are here, and one server uses one: number 0. CUDA_VISIBLE_DEVICES=N chooses"
    assert (told in caplog.text) == (count > 1)
    assert device.resolve_dtype("auto", torch.bfloat16) is torch.bfloat16


def test_memory_that_cannot_be_pinned_is_one_line_at_start(cuda: FakeCuda) -> None:
    cuda.register_result = 2
    with pytest.raises(ConfigError, match=r"lock 0\.00 GiB .*CUDA error 2.*--swap-space"):
        bare_device().allocate_host((10,), torch.float32)
