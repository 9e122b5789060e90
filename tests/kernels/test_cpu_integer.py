"""Linear layers over int8 weights: near their fp32 values, and blind to the other rows."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.cpu.library import Library
from serve.kernels.cpu.linear import CpuLinear, LinearPacker
from serve.kernels.stored import Dense
from tests.kernels.cpu_kernels import compiled

INT8 = 5


@cache
def packer(num_threads: int = 2) -> LinearPacker:
    compiled()  # skips where there is no compiler
    return LinearPacker(Library(num_threads, None), "int8")


def quantized(weight: Tensor, bias: Tensor | None = None, num_threads: int = 2) -> CpuLinear:
    linear = packer(num_threads)([Dense(weight)], bias)
    assert isinstance(linear, CpuLinear)
    assert linear.panels.storage == INT8
    return linear


def rounded(weight: Tensor) -> Tensor:
    """The float64 values that int8 stands for."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scale).round().double() * scale.double()


def weight_of(out: int, depth: int) -> Tensor:
    random = torch.Generator().manual_seed(out * depth)
    return torch.randn(out, depth, generator=random) / depth**0.5


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 13, 40, 300])
@pytest.mark.parametrize(
    ("out", "depth"), [(48, 64), (50, 33), (16, 900), (7, 5), (83, 1537), (20, 5001)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_weights_multiply_rows_of_any_size(
    num_rows: int, out: int, depth: int, with_bias: bool
) -> None:
    weight, x = weight_of(out, depth), torch.randn(num_rows, depth)
    bias = torch.randn(out) if with_bias else None

    result = quantized(weight, bias)(x)

    exact = x.double() @ rounded(weight).T
    if bias is not None:
        exact += bias.double()
    torch.testing.assert_close(result.double(), exact, atol=3e-4, rtol=1e-5)


def test_a_feature_a_thousand_times_larger_leaves_the_others_their_digits() -> None:
    weight, x = weight_of(64, 1024), torch.randn(20, 1024)
    x[:, 700] *= 1000
    weight[:, 700] = 0

    result = quantized(weight)(x)

    exact = x.double() @ rounded(weight).T
    error = (result.double() - exact).norm() / exact.norm()
    assert error < 0.02  # int8 rows would lose all the others: one step is 8 of their deviations


@pytest.mark.parametrize("depth", [512, 4096])
def test_the_largest_sums_do_not_overflow(depth: int) -> None:
    weight, x = torch.full((16, depth), -0.3), torch.full((8, depth), 1e30)

    result = quantized(weight)(x)

    torch.testing.assert_close(result, torch.full((8, 16), -0.3e30 * depth), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("out", "depth"), [(80, 576), (35, 1001), (18, 4500)])
def test_an_int8_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    out: int, depth: int
) -> None:
    weight, bias, x = weight_of(out, depth), torch.randn(out), torch.randn(520, depth)
    linear = quantized(weight, bias)

    whole = linear(x)

    assert torch.equal(quantized(weight, bias, num_threads=1)(x), whole)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 33, 191, 256, 257, 519):
        for start in (0, 1, 520 - num_rows):
            part = x[start : start + num_rows]
            assert torch.equal(linear(part), whole[start : start + num_rows])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**31))
def test_cutting_a_batch_into_chunks_changes_no_int8_result(sizes: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    linear = quantized(weight_of(40, 96))
    x = torch.randn(sum(sizes), 96, generator=random)

    chunks = torch.cat([linear(chunk) for chunk in x.split(sizes)])

    assert torch.equal(chunks, linear(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_a_row_that_is_not_finite_gives_nan_and_stays_with_itself(
    bad: float, num_rows: int
) -> None:
    x, linear = torch.randn(num_rows, 600), quantized(weight_of(32, 600))
    clean = linear(x)
    x[-1, 7] = bad

    poisoned = linear(x)

    assert torch.equal(poisoned[:-1], clean[:-1])
    assert poisoned[-1].isnan().all()


def test_zeros_and_values_too_small_to_invert_give_zero() -> None:
    linear = quantized(weight_of(32, 64))

    assert not linear(torch.zeros(3, 64)).any()
    assert linear(torch.full((3, 64), 1e-40)).abs().max() < 1e-38


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_make_their_output_nan_and_no_other(bad: float) -> None:
    weight, x = weight_of(20, 64), torch.randn(4, 64)
    clean = quantized(weight)(x)
    weight[3, 5] = bad
    weight[9] = 0

    result = quantized(weight)(x)

    assert result[:, 3].isnan().all()
    assert not result[:, 9].any()
    others = [i for i in range(20) if i not in (3, 9)]
    assert torch.equal(result[:, others], clean[:, others])


def test_no_rows_make_no_int8_result() -> None:
    assert quantized(torch.ones(8, 8))(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_any_type_are_rounded_from_their_values(dtype: torch.dtype) -> None:
    weight, x = weight_of(40, 64).to(dtype), torch.randn(3, 64)

    assert torch.equal(quantized(weight)(x), quantized(weight.float())(x))
