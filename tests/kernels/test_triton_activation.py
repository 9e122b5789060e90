"""The gated activation kernel, interpreted, against fp64."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import reference
from serve.kernels.triton.activation import gated_act
from tests.kernels.ragged import relative_error

BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", [5, 1536])
def test_it_is_exact_to_rounding(dtype: torch.dtype, activation: str, n: int) -> None:
    gate_up = (torch.randn(3, 2 * n) * 4).to(dtype)

    out = gated_act(gate_up, activation)

    exact = reference.gated_act(gate_up.double(), activation)
    assert out.dtype == dtype
    assert relative_error(out, exact) < BOUNDS[dtype]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_extreme_gates_stay_finite(activation: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]])

    out = gated_act(gate_up, activation)

    torch.testing.assert_close(out, torch.tensor([[0.0, 1e4, 0.0, 0.0]]))


def test_rows_of_a_wider_tensor_and_no_rows() -> None:
    wide = torch.randn(4, 40)

    out = gated_act(wide[:, :16], "silu")

    torch.testing.assert_close(out, reference.gated_act(wide[:, :16], "silu"))
    assert gated_act(wide[:0], "silu").shape == (0, 20)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="relu"):
        gated_act(torch.randn(1, 4), "relu")
