"""Weights find the narrowest form that gives back every bit, and multiply from it unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from torch import Tensor

from serve.kernels.cpu.linear import CpuLinear
from serve.kernels.cpu.panels import Panels
from serve.kernels.stored import (
    BLOCK_BYTES,
    Blocks,
    Dense,
    StoredMatrix,
    all_finite,
    dequantize,
    part_of,
)
from tests.kernels.cpu_kernels import compiled

FLOAT32, FLOAT16, BFLOAT16, BYTES, NIBBLES = range(5)


def blocks_of(kind: Kind, out: int = 40, depth: int = 96) -> Blocks:
    """What a GGUF file holds of random weights, with a block of zeros and one of equal values."""
    random = np.random.default_rng(out * depth)
    weight = random.normal(size=(out, depth)).astype(np.float32) * 0.05
    weight[0, :32] = 0
    weight[1, 32:64] = 0.25
    weight[2, :32] *= 1e-6
    return Blocks(kind.name, torch.from_numpy(quantize(weight, kind)))


def packed(*parts: StoredMatrix) -> CpuLinear:
    linear = compiled().pack_linear(parts, None)
    assert isinstance(linear, CpuLinear)
    return linear


def panels_of(weight: Tensor) -> Panels:
    return packed(Dense(weight)).panels


def unquantized(weight: Tensor) -> CpuLinear:
    """The same numbers as plain fp32."""
    out, depth = weight.shape
    lanes = torch.nn.functional.pad(weight, (0, 0, 0, -out % 16)).view(-1, 16, depth)
    panels = Panels(FLOAT32, out, depth, lanes.transpose(1, 2).contiguous())
    return CpuLinear(packed(Dense(weight))._library, panels, None)


@pytest.mark.parametrize(
    ("kind", "storage"), [(Kind.Q4_1, NIBBLES), (Kind.Q4_0, NIBBLES), (Kind.Q8_0, BYTES)]
)
@pytest.mark.parametrize(("out", "depth"), [(48, 64), (40, 1216), (5, 32)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 9, 200])
def test_blocks_multiply_with_the_bits_of_their_fp32_values(
    kind: Kind, storage: int, out: int, depth: int, num_rows: int
) -> None:
    blocks = blocks_of(kind, out, depth)
    x = torch.randn(num_rows, depth)

    linear = packed(blocks)

    assert linear.panels.storage == storage
    assert torch.equal(linear(x), unquantized(dequantize(blocks))(x))


def test_parts_are_stacked_in_their_form_or_else_as_values() -> None:
    first, second = blocks_of(Kind.Q4_1), blocks_of(Kind.Q4_1, out=24)
    third, x = blocks_of(Kind.Q8_0), torch.randn(3, 96)

    assert packed(first, second).panels.storage == NIBBLES
    assert packed(first, third).panels.storage == FLOAT32
    for parts in ((first, second), (first, third), (third, Dense(torch.randn(16, 96).half()))):
        apart = torch.cat([packed(part)(x) for part in parts], dim=1)
        assert torch.equal(packed(*parts)(x), apart)


def test_every_byte_of_a_block_counts() -> None:
    """Also those that no quantizer writes, such as -128 in Q8_0."""
    for kind, num_bytes in BLOCK_BYTES.items():
        data = torch.randint(0, 256, (32, 3 * num_bytes), dtype=torch.uint8)
        scales = data.view(32, 3, num_bytes)[..., : 4 if kind == "Q4_1" else 2]
        scales[..., 1::2] = scales[..., 1::2] % 64  # finite
        blocks = Blocks(kind, data)
        values = packed(blocks)(torch.eye(96)).T

        assert all_finite(blocks, torch.float32)
        assert torch.equal(values, dequantize(blocks))


def test_a_scale_whose_offset_is_beyond_16_bits_makes_floats() -> None:
    blocks = blocks_of(Kind.Q4_0)
    blocks.data[3, :2] = torch.tensor([30000.0], dtype=torch.float16).view(torch.uint8)
    x = torch.randn(2, 96)

    linear = packed(blocks)

    assert linear.panels.storage == FLOAT32
    assert torch.equal(linear(x), unquantized(dequantize(blocks))(x))


def test_blocks_that_are_not_finite_are_seen() -> None:
    for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0):
        blocks = blocks_of(kind)
        assert all_finite(blocks, torch.float16)
        blocks.data[3, :2] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
        assert not all_finite(blocks, torch.float32)


@pytest.mark.parametrize("columns", [slice(None), slice(32, 96), slice(8, 40)])
def test_a_part_of_a_matrix_has_its_values(columns: slice) -> None:
    for matrix in (Dense(torch.randn(40, 96)), *map(blocks_of, (Kind.Q4_1, Kind.Q8_0))):
        part = part_of(matrix, slice(8, 24), columns)
        assert torch.equal(dequantize(part), dequantize(matrix)[8:24, columns])


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


def test_panels_hold_sixteen_outputs_side_by_side() -> None:
    weight = torch.randn(20, 3)

    data = panels_of(weight).data

    assert data.shape == (2, 3, 16)
    assert torch.equal(data[0, 1], weight[:16, 1])
    assert torch.equal(data[1, 2, :4], weight[16:, 2])
    assert not data[1, :, 4:].any()
