"""The rotary kernel, interpreted, against its torch twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels import reference
from serve.kernels.triton.rope import rotary


def table(rotary_dim: int, max_len: int = 50) -> Tensor:
    inverse = 10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(max_len)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (9, 3, 64, 64), (2, 1, 80, 32), (1, 1, 96, 96), (17, 1, 16, 12)],
)
def test_it_equals_its_twin(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    query = torch.randn(5, num_heads, head_dim).to(dtype)
    key = torch.randn(5, num_kv_heads, head_dim).to(dtype)
    positions = torch.tensor([0, 1, 7, 49, 7])
    expected = reference.rotary(query.clone(), key.clone(), table(rotary_dim), positions)

    out = rotary(query, key, table(rotary_dim), positions)

    step = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # one rounding, either way
    torch.testing.assert_close(out, expected, atol=step, rtol=step)


def test_slices_of_a_fused_projection_are_rotated_in_place() -> None:
    fused = torch.randn(3, 8, 32)
    before = fused.clone()
    positions = torch.tensor([4, 5, 6])

    query, key = rotary(fused[:, :4], fused[:, 4:6], table(32), positions)

    expected = reference.rotary(before[:, :4], before[:, 4:6], table(32), positions)
    torch.testing.assert_close((query, key), expected)
    assert query.data_ptr() == fused.data_ptr()
    torch.testing.assert_close(fused[:, 6:], before[:, 6:], atol=0, rtol=0)


def test_no_tokens_is_no_launch() -> None:
    query, key = rotary(
        torch.randn(0, 2, 16), torch.randn(0, 1, 16), table(16), torch.zeros(0, dtype=torch.int64)
    )

    assert (query.shape, key.shape) == ((0, 2, 16), (0, 1, 16))


def test_a_table_wider_than_a_head_is_refused() -> None:
    with pytest.raises(AssertionError):
        rotary(torch.randn(1, 1, 16), torch.randn(1, 1, 16), table(32), torch.tensor([0]))
