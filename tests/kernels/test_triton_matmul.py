"""The batch-invariant linear layer, interpreted."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.stored import Dense
from serve.kernels.triton import triton_kernels
from serve.kernels.triton.matmul import invariant_linear
from serve.kernels.triton.tiles import Tile
from tests.kernels.interpreter import exact_dots
from tests.kernels.ragged import relative_error

TILE = Tile(block_m=32, tile_n=32, num_warps=4, num_stages=1, tile_k=32)
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("rows", "inner", "out"), [(1, 64, 48), (40, 33, 7), (70, 96, 100)])
def test_odd_shapes_are_exact_to_rounding(
    dtype: torch.dtype, rows: int, inner: int, out: int
) -> None:
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(out, inner).to(dtype)
    bias = torch.randn(out).to(dtype)

    for use_bias in (None, bias):
        result = invariant_linear(x, weight, use_bias, TILE)
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if use_bias is None else use_bias.double()
        )
        assert relative_error(result, exact) < BOUNDS[dtype]


def test_a_row_is_the_same_alone_and_anywhere_in_a_batch() -> None:
    linear = triton_kernels(batch_invariant=True).pack_linear(
        [Dense(torch.randn(80, 70))], torch.randn(80)
    )
    x = torch.randn(75, 70)
    with exact_dots():
        together = linear(x)
        alone = {row: linear(x[row : row + 1]) for row in (0, 31, 74)}

    for row, result in alone.items():
        torch.testing.assert_close(result, together[row : row + 1], atol=0, rtol=0)


def test_no_rows_is_an_empty_result() -> None:
    assert invariant_linear(torch.randn(0, 8), torch.randn(5, 8), None, TILE).shape == (0, 5)


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(AssertionError):
        invariant_linear(torch.randn(2, 8), torch.randn(5, 9), None, TILE)
