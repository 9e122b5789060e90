"""Norm, rotation and cache write in one launch, interpreted: the bits of the single operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels import reference
from serve.kernels.base import HeadNorms
from serve.kernels.triton import triton_kernels
from serve.kernels.triton.heads import prepare_heads
from tests.kernels.ragged import e4m3, relative_error
from tests.kernels.test_triton_rope import table

TRITON = triton_kernels()
TWIN = reference.kernels()
POSITIONS = torch.tensor([0, 1, 7, 49, 7])
SLOTS = torch.tensor([33, 8, 0, 47, 20])
DTYPES = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def norms_of(head_dim: int) -> HeadNorms:
    return HeadNorms(torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-6)


def cache(kernels: object, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    shape = kernels.attention.kv_shape(6, 8, num_kv_heads, head_dim)  # type: ignore[attr-defined]
    return torch.zeros(shape, dtype=dtype)


def in_slots(kv: Tensor, kernels: object) -> Tensor:
    """[2, slots, heads, dim] of a cache in either layout."""
    if kernels is TRITON:
        kv = kv.transpose(2, 3)
    return kv.float().flatten(1, 2)


def exact_queries(heads: Tensor, num_heads: int, norms: HeadNorms | None, rope: Tensor) -> Tensor:
    """fp64, with the rounding to the heads' dtype between norm and rotation."""
    query = heads[:, :num_heads].double()
    if norms is not None:
        inverse = (query.square().mean(-1, keepdim=True) + norms.eps).rsqrt()
        query = (query * inverse * norms.query.double()).to(heads.dtype).double()
    half = rope.shape[1] // 2
    cos, sin = rope[POSITIONS].double().unsqueeze(1).split(half, dim=-1)
    first, second, rest = query.tensor_split((half, 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["rope", "norms and rope"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (9, 3, 64, 64), (2, 1, 80, 32), (6, 5, 96, 96), (1, 1, 256, 128)],
)
def test_it_equals_its_twin_and_fp64(
    dtype: torch.dtype,
    has_norms: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    norms = norms_of(head_dim) if has_norms else None
    rope = table(rotary_dim)
    found = {}
    for kernels in (TWIN, TRITON):
        assert kernels.prepare_heads is not None
        kv = cache(kernels, num_kv_heads, head_dim, dtype)
        query = kernels.prepare_heads(heads.clone(), num_heads, norms, (rope, POSITIONS), kv, SLOTS)
        found[kernels.name] = query, in_slots(kv, kernels)

    step = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # one rounding, either way
    for ours, twins in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(ours.float(), twins.float(), atol=step, rtol=step)
    exact = exact_queries(heads, num_heads, norms, rope)
    assert relative_error(found["triton"][0], exact) < DTYPES[dtype]
    values = heads[:, num_heads + num_kv_heads :].float()
    assert torch.equal(found["triton"][1][1, SLOTS], values), "values are stored as they are"
    untouched = torch.ones(48, dtype=torch.bool).index_fill_(0, SLOTS, False)
    assert not found["triton"][1][:, untouched].any()


@pytest.mark.parametrize("has_norms", [False, True], ids=["rope", "norms and rope"])
def test_it_has_the_bits_of_the_single_kernels(has_norms: bool) -> None:
    """A model gives the same tokens whichever way its backend takes."""
    heads = torch.randn(5, 8, 64).bfloat16()
    norms = norms_of(64) if has_norms else None
    parts = reference.prepare_heads_by_parts(TRITON.rms_norm, TRITON.rotary, TRITON.attention)
    caches = [cache(TRITON, 2, 64, torch.bfloat16) for _ in range(2)]
    assert TRITON.prepare_heads is not None

    single = parts(heads.clone(), 4, norms, (table(64), POSITIONS), caches[0], SLOTS)
    fused = TRITON.prepare_heads(heads, 4, norms, (table(64), POSITIONS), caches[1], SLOTS)

    assert torch.equal(fused, single)
    assert torch.equal(caches[1], caches[0])


@pytest.mark.parametrize("kernels", [TWIN, TRITON], ids=["reference", "triton"])
def test_an_e4m3_cache_gets_each_head_by_its_own_scale(kernels: object) -> None:
    heads = torch.randn(5, 10, 64)
    scales = torch.rand(2, 3) * 0.02 + 0.005
    kv = cache(kernels, 3, 64, torch.float8_e4m3fn)

    kernels.prepare_heads(  # type: ignore[attr-defined]
        heads.clone(), 4, None, (table(64), POSITIONS), kv, SLOTS, scales
    )

    rotated = reference.rotary(heads[:, 4:7], heads[:, 4:7], table(64), POSITIONS)[0]
    for half, exact in enumerate((e4m3(rotated, scales[0]), e4m3(heads[:, 7:], scales[1]))):
        stored = in_slots(kv, kernels)[half, SLOTS] * scales[half, :, None]
        # A key on the edge between two numbers may be rotated to either side of it.
        assert relative_error(stored, exact) < 1e-3


def test_a_step_without_tokens_is_no_launch() -> None:
    kv = cache(TRITON, 1, 16, torch.float32)
    none = torch.zeros(0, dtype=torch.int64)

    query = prepare_heads(torch.zeros(0, 4, 16), 2, None, (table(16), none), kv, none)

    assert query.shape == (0, 2, 16)


def test_heads_that_do_not_lie_side_by_side_are_refused() -> None:
    kv = cache(TRITON, 1, 16, torch.float32)
    heads = torch.randn(5, 8, 16)[:, ::2]

    with pytest.raises(AssertionError):
        prepare_heads(heads, 2, None, (table(16), POSITIONS), kv, SLOTS)
