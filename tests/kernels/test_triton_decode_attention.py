"""Split-KV decode, interpreted: any number of splits gives the same answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.triton import triton_kernels
from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.decode_attention import (
    MAX_SPLITS,
    MIN_SPLIT_LEN,
    choose_num_splits,
    decode_attention,
    plan_splits,
)
from serve.kernels.triton.tiles import Tile
from tests.kernels.ragged import Options, Shape, Step, make_step, relative_error

BACKEND = triton_kernels().attention
TILE = Tile(block_m=16, tile_n=32, num_warps=4, num_stages=1)
LENS = [(1, 1), (1, 31), (1, 200)]
ALL = Options(softcap=20.0, window=90, sinks=torch.tensor([1.0, -1.0, 4.0, 0.5]))


def attend(step: Step, options: Options, num_splits: int) -> torch.Tensor:
    arguments = AttentionArguments.of(step.query, step.kv, step.meta, **options.keywords())
    out = torch.full_like(step.query, float("nan"))
    rows = len(step.meta.seq_lens_host)
    decode_attention(arguments, out, num_rows=rows, num_splits=num_splits, tile=TILE)
    return out


@pytest.mark.parametrize("num_splits", [1, 2, 4, 16])
@pytest.mark.parametrize("options", [Options(), ALL], ids=["plain", "all"])
def test_splits_never_change_the_answer(num_splits: int, options: Options) -> None:
    step = make_step(BACKEND, Shape(), LENS, seed=num_splits)

    out = attend(step, options, num_splits)

    torch.testing.assert_close(out.double(), step.exact(options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_with_several_kv_heads(head_dim: int) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=8)
    step = make_step(BACKEND, shape, [(1, 70)], seed=head_dim)

    out = attend(step, Options(), 2)

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision_rounds_and_no_more(dtype: torch.dtype, bound: float) -> None:
    step = make_step(BACKEND, Shape(dtype=dtype), LENS)

    assert relative_error(attend(step, ALL, 4), step.exact(ALL)) < bound


def test_padding_rows_give_finite_zeros() -> None:
    step = make_step(BACKEND, Shape(), [(1, 40), (1, 40)])
    step.meta.seq_lens[1] = 0
    step.meta.block_table[1] = 0

    for num_splits in (1, 2):
        out = attend(step, Options(), num_splits)

        torch.testing.assert_close(out[0].double(), step.exact(Options())[0], atol=1e-5, rtol=1e-5)
        assert not out[1].any()


def test_a_mixed_step_with_split_decodes_is_exact() -> None:
    step = make_step(BACKEND, Shape(), [(1, 600), (7, 20)])
    assert plan_splits(step.meta, 1, None, multiprocessors=8)[0] == 1

    out = step.attend(BACKEND, Options())

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


def test_decodes_that_gain_nothing_by_splitting_stay_in_the_one_launch() -> None:
    step = make_step(BACKEND, Shape(), [(1, 40), (7, 20)])

    assert plan_splits(step.meta, 1, None, multiprocessors=8) == (0, 1)


def test_a_window_bounds_what_there_is_to_split() -> None:
    step = make_step(BACKEND, Shape(), [(1, 600)])

    assert plan_splits(step.meta, 1, None, multiprocessors=8) == (1, 2)
    assert plan_splits(step.meta, 1, 100, multiprocessors=8) == (1, 1)


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    heads=st.sampled_from([1, 2, 4, 8, 32]),
    kv_len=st.integers(1, 200_000),
    multiprocessors=st.sampled_from([8, 80, 108, 132, 148, 304]),
)
def test_the_split_rule_stays_within_its_bounds(
    rows: int, heads: int, kv_len: int, multiprocessors: int
) -> None:
    splits = choose_num_splits(rows, heads, kv_len, multiprocessors)

    assert splits in [1, 2, 4, 8, 16, 32, MAX_SPLITS]
    assert splits == 1 or kv_len >= splits * MIN_SPLIT_LEN
    if rows * heads >= 8 * multiprocessors * 2:
        assert splits == 1, "enough programs need no splits"


def test_one_long_request_is_spread_over_the_gpu() -> None:
    assert choose_num_splits(1, 8, 32_768, multiprocessors=132) == 32
    assert choose_num_splits(256, 8, 32_768, multiprocessors=132) == 1
