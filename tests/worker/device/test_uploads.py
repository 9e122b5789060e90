"""A step's numbers on their way to the device: one copy a call, through memory that stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve.worker.device.uploads import DirectUploads, StagedUploads
from tests.worker.async_device import AsyncDevice

ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
    np.array([], dtype=np.int64),
    np.array([[0.5, -1.0]], dtype=np.float32),
)


def test_arrays_arrive_in_their_dtypes_and_shapes_whatever_their_strides() -> None:
    for uploads in (StagedUploads(AsyncDevice(), 1000), DirectUploads()):
        uploads.begin()
        for sent, array in zip(uploads.send(*ARRAYS), ARRAYS, strict=True):
            assert sent.dtype == torch.from_numpy(array).dtype
            assert sent.tolist() == array.tolist()


def test_one_step_keeps_what_all_its_calls_sent_and_every_step_uses_the_same_memory() -> None:
    uploads = StagedUploads(AsyncDevice(), 1000)
    places = []
    for step in range(5):
        uploads.begin()
        first, second = (uploads.send(np.full(3, 10 * step + call))[0] for call in range(2))
        assert first.tolist() == [10 * step] * 3
        assert second.tolist() == [10 * step + 1] * 3
        places.append((first.data_ptr(), second.data_ptr()))
    assert len(set(places)) == 1
    assert all(place % 16 == 0 for place in places[0]), "kernels read 16 bytes at once"


def test_host_memory_is_written_again_only_after_its_mark_was_waited_for() -> None:
    device = AsyncDevice()
    uploads = StagedUploads(device, 100)
    for step in range(7):
        uploads.begin()
        uploads.send(np.arange(3))
        assert sum(mark.num_set for mark in device.marks) == step + 1
        assert sum(mark.num_waits for mark in device.marks) == step + 1
    assert sorted(mark.num_waits for mark in device.marks) == [2, 2, 3], "slots take turns"


@pytest.mark.parametrize("size", [100, 101])
def test_what_does_not_fit_is_sent_by_itself(size: int) -> None:
    uploads = StagedUploads(AsyncDevice(), 800)
    uploads.begin()
    (small,) = uploads.send(np.arange(2))
    (large,) = uploads.send(np.arange(size))
    (again,) = uploads.send(np.arange(1))

    assert (small.tolist(), large.tolist(), again.tolist()) == ([0, 1], [*range(size)], [0])
