"""Block copies, interpreted: the right blocks, all reads before all writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve.kernels.triton import block_copy, triton_kernels
from serve.kernels.triton.block_copy import copy_blocks
from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.storage import KVStorage, Tier


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_blocks_move_between_tensors_of_different_length(dtype: torch.dtype) -> None:
    src = (torch.rand(2, 7, 3, 8, 16) * 200).to(dtype)
    dst = (torch.rand(2, 5, 3, 8, 16) * 200).to(dtype)
    expected = dst.clone()
    expected[:, [4, 0, 2]] = src[:, [6, 1, 3]]

    copy_blocks(src, dst, torch.tensor([6, 1, 3]), torch.tensor([4, 0, 2]))

    torch.testing.assert_close(dst, expected, atol=0, rtol=0)


def test_a_chain_within_one_tensor_reads_before_it_writes() -> None:
    cache = torch.randn(2, 5, 2, 8, 16)
    expected = cache.clone()
    expected[:, [1, 2, 3]] = cache[:, [0, 1, 2]]

    copy_blocks(cache, cache, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))

    torch.testing.assert_close(cache, expected, atol=0, rtol=0)


class Launches:
    """Counts the launches of a kernel that it passes on."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted = Launches(block_copy.block_copy_kernel)
    monkeypatch.setattr(block_copy, "block_copy_kernel", counted)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_all_layers_of_a_pool_are_swapped_out_and_in_by_one_launch_each(
    launches: Launches, dtype: torch.dtype
) -> None:
    backend = triton_kernels().attention
    storage = KVStorage(
        [lambda n: backend.kv_shape(n, 8, 2, 16)] * 5,
        num_blocks=4,
        num_host_blocks=6,
        dtype=dtype,
        allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        copy_blocks=copy_blocks,
        allocate_host=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    )
    bits = [layer.view(torch.uint8) for layer in storage.layers]
    for layer in bits:
        layer.copy_(torch.randint(0, 100, layer.shape))
    before = [layer[:, [3, 1]].clone() for layer in bits]

    storage.copy([BlockCopy(3, 1), BlockCopy(1, 5)], src=Tier.DEVICE, dst=Tier.HOST)
    assert launches.count == 1
    for layer in bits:
        layer[:, [1, 2, 3]] = 0
    storage.copy([BlockCopy(1, 2), BlockCopy(5, 1)], src=Tier.HOST, dst=Tier.DEVICE)
    assert launches.count == 2
    for layer, kept in zip(bits, before, strict=True):
        torch.testing.assert_close(layer[:, [2, 1]], kept, atol=0, rtol=0)

    storage.copy([BlockCopy(1, 3), BlockCopy(2, 4)], src=Tier.DEVICE, dst=Tier.DEVICE)
    assert launches.count == 3, "no block is both read and written"
    for layer, kept in zip(bits, before, strict=True):
        torch.testing.assert_close(layer[:, [4, 3]], kept, atol=0, rtol=0)


def test_large_blocks_take_several_programs() -> None:
    src, dst = torch.randn(2, 2, 9000), torch.zeros(2, 2, 9000)

    copy_blocks(src, dst, torch.tensor([1]), torch.tensor([0]))

    torch.testing.assert_close(dst[:, 0], src[:, 1], atol=0, rtol=0)
    assert not dst[:, 1].any()


def test_nothing_to_copy_is_no_launch() -> None:
    cache = torch.randn(2, 2, 16)
    none = torch.zeros(0, dtype=torch.int64)
    before = cache.clone()

    copy_blocks(cache, cache, none, none)

    torch.testing.assert_close(cache, before, atol=0, rtol=0)


def test_blocks_of_another_shape_are_refused() -> None:
    with pytest.raises(AssertionError):
        copy_blocks(
            torch.randn(2, 2, 16), torch.randn(2, 2, 8), torch.tensor([0]), torch.tensor([0])
        )
