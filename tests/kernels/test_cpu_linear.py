"""The packed linear layer: right, lossless in its storage, and blind to the other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.stored import Dense
from tests.kernels.cpu_kernels import compiled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def weight_of(dtype: torch.dtype, out: int, depth: int) -> Tensor:
    """fp32 values that need no more than `dtype`."""
    random = torch.Generator().manual_seed(out * depth)
    return (torch.randn(out, depth, generator=random) / depth**0.5).to(dtype).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 7, 13, 200])
@pytest.mark.parametrize(("out", "depth"), [(48, 64), (50, 33), (16, 900), (7, 5)])
def test_a_linear_layer_multiplies(dtype: torch.dtype, num_rows: int, out: int, depth: int) -> None:
    weight, bias = weight_of(dtype, out, depth), torch.randn(out)
    x = torch.randn(num_rows, depth)

    result = compiled().pack_linear([Dense(weight)], bias)(x)

    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(result.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "depth"), [(80, 576), (35, 1000)])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    dtype: torch.dtype, out: int, depth: int
) -> None:
    weight = weight_of(dtype, out, depth)
    linear = compiled().pack_linear([Dense(weight)], None)
    single_thread = compiled(1).pack_linear([Dense(weight)], None)
    x = torch.randn(260, depth)

    whole = linear(x)

    assert torch.equal(single_thread(x), whole)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 33, 191, 192, 193, 259):
        for start in (0, 1, 260 - num_rows):
            part = x[start : start + num_rows]
            assert torch.equal(linear(part), whole[start : start + num_rows])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**31))
def test_cutting_a_batch_into_chunks_changes_nothing(sizes: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    linear = compiled().pack_linear([Dense(weight_of(torch.float16, 40, 96))], None)
    x = torch.randn(sum(sizes), 96, generator=random)

    chunks = torch.cat([linear(chunk) for chunk in x.split(sizes)])

    assert torch.equal(chunks, linear(x))


def test_a_row_of_nan_stays_with_itself() -> None:
    x = torch.randn(9, 64)
    linear = compiled().pack_linear([Dense(weight_of(torch.float32, 32, 64))], None)
    clean = linear(x)
    x[4] = float("nan")

    poisoned = linear(x)

    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[4].isnan().all()


def test_no_rows_make_no_result() -> None:
    assert compiled().pack_linear([Dense(torch.ones(8, 8))], None)(torch.empty(0, 8)).shape == (
        0,
        8,
    )
