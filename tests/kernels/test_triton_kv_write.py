"""Keys and values land in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.triton import triton_kernels
from serve.kernels.triton.kv_write import write_kv

BACKEND = triton_kernels().attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 64), (16, 80), (32, 256), (64, 96)])
def test_every_slot_gets_its_token_and_no_other_slot_changes(
    dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    kv = torch.randn(BACKEND.kv_shape(4, block_size, 3, head_dim)).to(dtype)
    expected = kv.clone()
    key, value = (torch.randn(11, 3, head_dim).to(dtype) for _ in range(2))
    slots = torch.randperm(4 * block_size)[:11]
    for token, slot in enumerate(slots.tolist()):
        expected[0, slot // block_size, :, slot % block_size] = key[token]
        expected[1, slot // block_size, :, slot % block_size] = value[token]

    write_kv(key, value, kv, slots)

    torch.testing.assert_close(kv, expected, atol=0, rtol=0)


def test_slices_of_a_fused_projection_are_written_in_place() -> None:
    kv = torch.zeros(BACKEND.kv_shape(2, 16, 2, 64))
    fused = torch.randn(5, 8, 64)

    write_kv(fused[:, 4:6], fused[:, 6:], kv, torch.arange(16, 21))

    torch.testing.assert_close(kv[0, 1, :, :5].transpose(0, 1), fused[:, 4:6])
    torch.testing.assert_close(kv[1, 1, :, :5].transpose(0, 1), fused[:, 6:])


def test_nothing_to_write_is_no_launch() -> None:
    kv = torch.zeros(BACKEND.kv_shape(2, 16, 2, 64))

    write_kv(kv.new_zeros(0, 2, 64), kv.new_zeros(0, 2, 64), kv, torch.zeros(0, dtype=torch.int64))

    assert not kv.any()


def test_a_mapping_of_another_length_is_refused() -> None:
    kv = torch.zeros(BACKEND.kv_shape(2, 16, 2, 64))

    with pytest.raises(AssertionError):
        write_kv(kv[0, 0].transpose(0, 1), kv[0, 0].transpose(0, 1), kv, torch.arange(3))
