"""Block copies, interpreted: the right blocks, all reads before all writes."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.triton.block_copy import copy_blocks


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


def test_all_layers_of_a_block_move_in_one_call() -> None:
    device, host = torch.randn(2, 4, 3, 2, 8, 16), torch.zeros(2, 6, 3, 2, 8, 16)
    layers = device.unbind(2)

    copy_blocks(device, host, torch.tensor([3, 1]), torch.tensor([0, 5]))
    before = [layer[:, [3, 1]].clone() for layer in layers]
    device[:, [1, 2, 3]] = 0
    copy_blocks(host, device, torch.tensor([0, 5]), torch.tensor([2, 1]))

    for layer, kept in zip(layers, before, strict=True):
        torch.testing.assert_close(layer[:, [2, 1]], kept, atol=0, rtol=0)


def test_one_layer_of_a_cache_that_keeps_layers_together() -> None:
    caches = torch.randn(2, 4, 3, 2, 8, 16)
    before = caches.clone()

    copy_blocks(caches[:, :, 1], caches[:, :, 1], torch.tensor([3]), torch.tensor([0]))

    torch.testing.assert_close(caches[:, 0, 1], before[:, 3, 1], atol=0, rtol=0)
    torch.testing.assert_close(caches[:, :, 0], before[:, :, 0], atol=0, rtol=0)


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
