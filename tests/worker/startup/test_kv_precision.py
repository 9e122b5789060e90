"""The KV cache's precision: what the flag means, and scales by looking at a cache."""

from __future__ import annotations

import pytest
import torch

from serve.config import CacheConfig
from serve.errors import ConfigError
from serve.kernels import reference
from serve.kernels.base import AttentionBackend
from serve.kernels.triton import triton_kernels
from serve.worker.startup.kv_precision import cache_dtype, measured_scales


@pytest.mark.parametrize(
    ("wanted", "dtype"),
    [("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn)],
)
def test_the_cache_is_in_the_models_dtype_or_in_e4m3(wanted: str, dtype: torch.dtype) -> None:
    settings = CacheConfig(kv_cache_dtype=wanted)  # type: ignore[arg-type]

    assert cache_dtype(settings, torch.bfloat16) is dtype


def test_measuring_scales_for_a_cache_that_has_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="calculate-kv-scales"):
        CacheConfig(calculate_kv_scales=True)


@pytest.mark.parametrize(
    "attention", [reference.ReferenceAttention(), triton_kernels().attention], ids=lambda a: a.name
)
def test_each_heads_largest_number_gets_half_of_the_range(attention: AttentionBackend) -> None:
    layers = [torch.zeros(attention.kv_shape(3, 8, 2, 16)) for _ in range(2)]
    largest = torch.tensor([[3.0, 0.5], [10.0, 224.0]])
    key, value = (row[None, :, None] * torch.linspace(-1, 0.5, 16) for row in largest)
    attention.write_kv(key, value, layers[1], torch.tensor([9]))

    untouched, measured = measured_scales(layers, attention)

    assert torch.equal(untouched, torch.ones(2, 2)), "a head that is always 0 divides by 1"
    assert torch.allclose(measured, largest / 224)
