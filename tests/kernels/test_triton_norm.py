"""RMS norm kernels, interpreted, against fp64 and their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels import reference
from serve.kernels.triton.norm import add_rms_norm, rms_norm
from tests.kernels.ragged import relative_error

BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("n", [7, 64, 576, 1000])
def test_norm_is_exact_to_rounding(dtype: torch.dtype, n: int) -> None:
    x, weight = torch.randn(3, n).to(dtype), torch.randn(n).to(dtype)

    assert relative_error(rms_norm(x, weight, 1e-5), exact(x, weight, 1e-5)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_sum_is_rounded_before_its_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(4, 96).to(dtype) for _ in range(3))

    normed, total = add_rms_norm(x, residual, weight[0], 1e-6)

    torch.testing.assert_close(total, x + residual, atol=0, rtol=0)
    assert relative_error(normed, exact(total, weight[0], 1e-6)) < BOUNDS[dtype]


def test_heads_of_a_fused_projection_are_normed_in_place_of_a_copy() -> None:
    fused, weight = torch.randn(3, 6, 64), torch.randn(64)

    out = rms_norm(fused[:, 2:5], weight, 1e-6)

    assert out.is_contiguous()
    torch.testing.assert_close(out, reference.rms_norm(fused[:, 2:5], weight, 1e-6))


def test_other_shapes_are_rows_of_the_last_dim() -> None:
    x, weight = torch.randn(2, 2, 2, 16), torch.randn(16)

    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(
        rms_norm(x[0, 0, 0], weight, 1e-6), reference.rms_norm(x[0, 0, 0], weight, 1e-6)
    )


def test_no_rows_is_an_empty_result() -> None:
    empty, weight = torch.randn(0, 32), torch.randn(32)

    assert rms_norm(empty, weight, 1e-6).shape == (0, 32)
    assert [part.shape for part in add_rms_norm(empty, empty, weight, 1e-6)] == [(0, 32)] * 2


def test_large_values_do_not_overflow_half_precision() -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)

    out = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)

    torch.testing.assert_close(out, torch.ones_like(out))


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.randn(2, 32), torch.randn(16), 1e-6)
