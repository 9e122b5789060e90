"""The e4m3 cache, interpreted: written, read and attended as its torch twin and as fp64 say."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import reference
from serve.kernels.base import AttentionBackend
from serve.kernels.triton import triton_kernels
from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.backend import TritonAttention
from serve.kernels.triton.decode_attention import decode_attention
from serve.kernels.triton.decode_plan import plan_decode
from serve.kernels.triton.fp8 import converts_e4m3
from serve.kernels.triton.kv_write import write_kv
from serve.kernels.triton.tiles import Tile, load_tiles
from tests.kernels.ragged import Options, Shape, make_step, relative_error

MIX = [(1, 1), (1, 70), (3, 3), (9, 40)]
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FORMS = {"bytes": torch.uint8, "e4m3": torch.float8_e4m3fn}
ALL = Options(softcap=20.0, window=60, sinks=torch.tensor([1.0, -1.0, 4.0, 0.5]))
BACKEND = triton_kernels().attention


def backend(form: str) -> TritonAttention:
    """As on a GPU without conversions of e4m3, and on one that has them."""
    tiles = load_tiles("interpreter")
    found = TritonAttention(tiles)
    found._takes_bytes = form == "bytes"
    return found


def every_number() -> torch.Tensor:
    """Every finite e4m3, the middles between neighbours, and both sides of each middle; more."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [middles * (1 + 2.0**-20), middles * (1 - 2.0**-20)]
    far = torch.tensor([448.0, 460.0, 1e9, 2.0**-11, 2.0**-10, 1e-30, 0.0])
    found = torch.cat([numbers, middles, *near, far])
    return torch.cat([found, -found])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_is_rounded_to_the_nearest_and_bounded(form: str, dtype: torch.dtype) -> None:
    numbers = every_number()
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 1, 16).to(dtype)
    scales = torch.tensor([[1.0], [0.25]])
    slots = torch.arange(len(numbers))
    blocks = -(-len(numbers) // 16)
    kv, expected = (
        torch.zeros(b.kv_shape(blocks, 16, 1, 16), dtype=torch.float8_e4m3fn)
        for b in (BACKEND, reference.ReferenceAttention())
    )
    reference.ReferenceAttention().write_kv(numbers, numbers, expected, slots, scales)

    write_kv(numbers, numbers, kv.view(FORMS[form]), slots, scales)

    assert torch.equal(kv.view(torch.uint8).flatten(), expected.view(torch.uint8).flatten())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [*((dtype, 64) for dtype in BOUNDS), (torch.bfloat16, 80)], ids=str
)
def test_a_mixed_step_over_an_e4m3_cache_is_exact_but_for_the_caches_own_rounding(
    form: str, dtype: torch.dtype, head_dim: int
) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype, e4m3=True)
    attention = backend(form)
    step = make_step(attention, shape, MIX, seed=head_dim)

    out = step.attend(attention, Options())

    assert out.dtype == dtype
    assert relative_error(out, step.exact(Options())) < BOUNDS[dtype]


@pytest.mark.parametrize("multiprocessors", [1, 16])
@pytest.mark.parametrize("options", [Options(), ALL], ids=["plain", "all"])
def test_split_decodes_scale_their_values_once(multiprocessors: int, options: Options) -> None:
    step = make_step(BACKEND, Shape(e4m3=True), [(1, 1), (1, 31), (1, 200)])
    arguments = AttentionArguments.of(
        step.query,
        step.kv.view(torch.uint8),
        step.meta,
        **options.keywords(),
        kv_scales=step.kv_scales,
    )
    out = torch.full_like(step.query, float("nan"))
    tile = Tile(block_m=16, tile_n=32, num_warps=4, num_stages=1)

    plan = plan_decode(arguments, num_rows=3, tile=tile, multiprocessors=multiprocessors)
    decode_attention(arguments, out, plan, tile=tile)

    torch.testing.assert_close(out.double(), step.exact(options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [Options(), ALL], ids=["plain", "all"])
@pytest.mark.parametrize("attention", [BACKEND, reference.ReferenceAttention()], ids=type)
def test_scores_are_scaled_before_they_are_capped(
    attention: AttentionBackend, options: Options
) -> None:
    step = make_step(attention, Shape(e4m3=True), MIX, seed=5)

    torch.testing.assert_close(
        step.attend(attention, options).double(), step.exact(options), atol=1e-5, rtol=1e-5
    )


def test_twice_the_values_scale_is_twice_the_result() -> None:
    step = make_step(BACKEND, Shape(num_heads=4, num_kv_heads=2, e4m3=True), [(1, 20), (3, 3)])
    assert step.kv_scales is not None
    step.kv_scales[:] = torch.tensor([[0.5], [2.0]])  # one for all heads

    once = step.attend(BACKEND, Options())
    step.kv_scales[1] *= 2

    torch.testing.assert_close(step.attend(BACKEND, Options()), once * 2)


def test_a_cache_has_scales_if_it_is_e4m3_and_only_then() -> None:
    step = make_step(BACKEND, Shape(e4m3=True), [(2, 5)])
    plain = make_step(BACKEND, Shape(), [(2, 5)])

    with pytest.raises(AssertionError):
        BACKEND.attend(step.query, step.kv, step.meta, scale=1.0)
    with pytest.raises(AssertionError):
        BACKEND.attend(plain.query, plain.kv, plain.meta, scale=1.0, kv_scales=step.kv_scales)
    with pytest.raises(AssertionError):
        write_kv(step.query, step.query, step.kv, step.meta.slot_mapping, None)


def test_gpus_that_convert_e4m3_are_given_it() -> None:
    given = {t: converts_e4m3(t) for t in ("cuda:80", "cuda:89", "cuda:90", "hip:gfx942")}

    assert given == {"cuda:80": False, "cuda:89": True, "cuda:90": True, "hip:gfx942": True}
    assert not converts_e4m3("interpreter")
