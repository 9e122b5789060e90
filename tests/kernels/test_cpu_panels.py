"""Weights find the narrowest form that gives back every bit, and multiply from it unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import Tensor

from serve.kernels.cpu.linear import CpuLinear
from serve.kernels.cpu.panels import Panels
from tests.kernels.cpu_kernels import compiled

FLOAT32, FLOAT16, BFLOAT16, BYTES, NIBBLES = range(5)


def dequantized(kind: Kind, out: int = 40, depth: int = 96) -> Tensor:
    """What a GGUF file of random weights gives, with a block of zeros and one of equal values."""
    random = np.random.default_rng(out * depth)
    weight = random.normal(size=(out, depth)).astype(np.float32) * 0.05
    weight[0, :32] = 0
    weight[1, 32:64] = 0.25
    weight[2, :32] *= 1e-6
    return torch.from_numpy(dequantize(quantize(weight, kind), kind))


def panels_of(weight: Tensor) -> Panels:
    linear = compiled().pack_linear(weight, None)
    assert isinstance(linear, CpuLinear)
    return linear.panels


@pytest.mark.parametrize(
    ("kind", "storage"), [(Kind.Q4_1, NIBBLES), (Kind.Q4_0, NIBBLES), (Kind.Q8_0, BYTES)]
)
def test_dequantized_weights_go_back_into_their_blocks(kind: Kind, storage: int) -> None:
    assert panels_of(dequantized(kind)).storage == storage


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_0, Kind.Q8_0])
@pytest.mark.parametrize(("out", "depth"), [(48, 64), (40, 1216), (5, 32)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 9, 200])
def test_blocks_multiply_with_the_bits_of_their_fp32_values(
    kind: Kind, out: int, depth: int, num_rows: int
) -> None:
    weight = dequantized(kind, out + 3, depth)[3:]  # without the odd blocks, for short matrices
    weight = dequantized(kind, out, depth) if out > 16 else weight
    x = torch.randn(num_rows, depth)

    assert torch.equal(packed(weight)(x), unquantized(weight)(x))


def packed(weight: Tensor) -> CpuLinear:
    linear = compiled().pack_linear(weight, None)
    assert isinstance(linear, CpuLinear)
    assert linear.panels.storage in (BYTES, NIBBLES)
    return linear


def unquantized(weight: Tensor) -> CpuLinear:
    """The same numbers as plain fp32."""
    out, depth = weight.shape
    lanes = torch.nn.functional.pad(weight, (0, 0, 0, -out % 16)).view(-1, 16, depth)
    panels = Panels(FLOAT32, out, depth, lanes.transpose(1, 2).contiguous())
    return CpuLinear(packed(weight)._library, panels, None)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, FLOAT32), (torch.float16, FLOAT16), (torch.bfloat16, BFLOAT16)],
    ids=str,
)
def test_other_weights_are_kept_in_the_narrowest_type_that_loses_nothing(
    dtype: torch.dtype, storage: int
) -> None:
    weight = torch.randn(32, 64)
    weight[0, 0] = 1e38 if dtype is torch.bfloat16 else 0.5
    weight = weight.to(dtype)

    assert panels_of(weight).storage == storage
    assert panels_of(weight.float()).storage == storage


def test_one_value_off_its_grid_keeps_the_matrix_in_floats() -> None:
    weight = dequantized(Kind.Q4_1)
    weight[39, 95] += 1e-4

    assert panels_of(weight).storage == FLOAT32


def test_weights_that_do_not_fill_blocks_or_are_not_finite_stay_floats() -> None:
    infinite = dequantized(Kind.Q8_0)
    infinite[3, 3] = float("inf")
    poisoned = dequantized(Kind.Q4_1)
    poisoned[3, 3] = float("nan")

    assert panels_of(torch.ones(16, 40)).storage == FLOAT16
    assert panels_of(infinite).storage == FLOAT32
    assert panels_of(poisoned).storage == FLOAT32


def test_panels_hold_sixteen_outputs_side_by_side() -> None:
    weight = torch.randn(20, 3)

    data = panels_of(weight).data

    assert data.shape == (2, 3, 16)
    assert torch.equal(data[0, 1], weight[:16, 1])
    assert torch.equal(data[1, 2, :4], weight[16:, 2])
    assert not data[1, :, 4:].any()
