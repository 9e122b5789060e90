"""Norms, rotary embedding and activations against their plain-torch twins."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import reference
from tests.kernels.cpu_kernels import compiled

SIZES = [(1, 576), (17, 100), (300, 32), (3, 5)]


@pytest.mark.parametrize(("num_rows", "n"), SIZES)
def test_rms_norm(num_rows: int, n: int) -> None:
    x, weight = torch.randn(num_rows, n) * 3, torch.randn(n)

    out = compiled().rms_norm(x, weight, 1e-5)

    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6)


def test_rms_norm_of_heads() -> None:
    x, weight = torch.randn(7, 4, 64), torch.randn(64)

    out = compiled().rms_norm(x, weight, 1e-6)

    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("num_rows", "n"), SIZES)
def test_add_rms_norm_also_returns_the_sum(num_rows: int, n: int) -> None:
    x, residual, weight = torch.randn(num_rows, n), torch.randn(num_rows, n), torch.randn(n)

    out, summed = compiled().add_rms_norm(x, residual, weight, 1e-5)

    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rotary_dim", [64, 32, 10])
def test_rotary_rotates_slices_of_fused_qkv(rotary_dim: int) -> None:
    fused = torch.randn(11, 8, 64)
    query, key, value = fused.split([4, 2, 2], dim=1)
    untouched = value.clone()
    angles = torch.rand(100, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 100, (11,))
    expected = reference.rotary(query, key, cos_sin, positions)

    rotated = compiled().rotary(query, key, cos_sin, positions)

    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert torch.equal(value, untouched)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("num_rows", "n"), SIZES)
def test_gated_activations(activation: str, num_rows: int, n: int) -> None:
    gate_up = torch.randn(num_rows, 2 * n) * 4
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])

    out = compiled().gated_act(gate_up, activation)

    expected = reference.gated_act(gate_up, activation)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rows_keep_their_bits_in_any_company(activation: str) -> None:
    kernels = compiled()
    x, weight = torch.randn(300, 200), torch.randn(200)
    normed, gated = kernels.rms_norm(x, weight, 1e-5), kernels.gated_act(x, activation)

    for row in (0, 1, 150, 299):
        alone = x[row : row + 1]
        assert torch.equal(kernels.rms_norm(alone, weight, 1e-5)[0], normed[row])
        assert torch.equal(kernels.gated_act(alone, activation)[0], gated[row])


def test_nan_is_not_hidden() -> None:
    x = torch.full((1, 32), float("nan"))

    assert compiled().rms_norm(x, torch.ones(32), 1e-5).isnan().all()
    assert compiled().gated_act(x, "silu").isnan().all()
