"""Decode attention in pieces, interpreted: however contexts are cut, the answer is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.triton import triton_kernels
from serve.kernels.triton.arguments import AttentionArguments
from serve.kernels.triton.decode_attention import decode_attention
from serve.kernels.triton.decode_plan import DecodePlan, num_decode_rows, plan_decode
from serve.kernels.triton.launch import cdiv
from serve.kernels.triton.tiles import Tile
from tests.kernels.ragged import Options, Shape, Step, make_step, relative_error

BACKEND = triton_kernels().attention
TILE = Tile(block_m=16, tile_n=32, num_warps=4, num_stages=1)
LENS = [(1, 1), (1, 31), (1, 200), (1, 700)]
ALL = Options(softcap=20.0, window=90, sinks=torch.tensor([1.0, -1.0, 4.0, 0.5]))


def attend(step: Step, options: Options, multiprocessors: int) -> torch.Tensor:
    arguments = AttentionArguments.of(step.query, step.kv, step.meta, **options.keywords())
    out = torch.full_like(step.query, float("nan"))
    rows = len(step.meta.seq_lens_host)
    plan = plan_decode(arguments, num_rows=rows, tile=TILE, multiprocessors=multiprocessors)
    decode_attention(arguments, out, plan, tile=TILE)
    return out


@pytest.mark.parametrize("multiprocessors", [1, 4, 16, 60])
@pytest.mark.parametrize("options", [Options(), ALL], ids=["plain", "all"])
def test_pieces_never_change_the_answer(multiprocessors: int, options: Options) -> None:
    step = make_step(BACKEND, Shape(), LENS, seed=multiprocessors)

    out = attend(step, options, multiprocessors)

    torch.testing.assert_close(out.double(), step.exact(options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_with_several_kv_heads(head_dim: int) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=8)
    step = make_step(BACKEND, shape, [(1, 70)], seed=head_dim)

    out = attend(step, Options(), 8)

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision_rounds_and_no_more(dtype: torch.dtype, bound: float) -> None:
    step = make_step(BACKEND, Shape(dtype=dtype), LENS)

    assert relative_error(attend(step, ALL, 16), step.exact(ALL)) < bound


def test_padding_rows_give_finite_zeros() -> None:
    for multiprocessors in (1, 16):
        step = make_step(BACKEND, Shape(), [(1, 400), (1, 40)])
        step.meta.seq_lens[1] = 0
        step.meta.block_table[1] = 0

        out = attend(step, Options(), multiprocessors)

        torch.testing.assert_close(out[0].double(), step.exact(Options())[0], atol=1e-5, rtol=1e-5)
        assert not out[1].any()


@pytest.mark.parametrize("lens", [[(1, 1200), (7, 20)], [(1, 40), (7, 20)]], ids=["long", "short"])
def test_a_mixed_step_is_exact(lens: list[tuple[int, int]]) -> None:
    step = make_step(BACKEND, Shape(), lens)

    out = step.attend(BACKEND, Options())

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


def test_decodes_join_the_prompts_launch_only_if_few_and_short() -> None:
    def rows(lens: list[tuple[int, int]], window: int | None = None) -> int:
        meta = make_step(BACKEND, Shape(), lens).meta
        return num_decode_rows(meta, 1, window, multiprocessors=8)

    assert rows([(1, 40), (7, 20)]) == 0
    assert rows([(1, 40)] * 5 + [(7, 20)]) == 5, "many"
    assert rows([(1, 2000), (7, 20)]) == 1, "long"
    assert rows([(1, 2000), (7, 20)], window=100) == 0, "long, but little of it is seen"
    assert rows([(1, 40)]) == 1, "nobody to join"


def plan_of(
    seq_lens: list[int], *, num_kv_heads: int = 8, multiprocessors: int = 132, window: int = 0
) -> DecodePlan:
    """The plan for contexts of these lengths, without keys."""
    rows = len(seq_lens)
    arguments = AttentionArguments(
        query=torch.zeros(rows, num_kv_heads, 16),
        kv=torch.zeros(2, 1, num_kv_heads, 16, 16),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
        kv_scales=None,
        sinks=None,
        scale=1.0,
        window=window or None,
        softcap=None,
    )
    tile = replace(TILE, tile_n=64)
    return plan_decode(arguments, num_rows=rows, tile=tile, multiprocessors=multiprocessors)


def num_rounds(plan: DecodePlan, seq_lens: list[int], num_kv_heads: int, places: int) -> float:
    """Tiles walked one after another, if each round of programs lasts as long as its longest."""
    counts = plan.piece_start.diff().tolist()
    longest = max(cdiv(cdiv(n, 64), c) for n, c in zip(seq_lens, counts, strict=True))
    return cdiv(sum(counts) * num_kv_heads, places) * longest


@settings(deadline=None, max_examples=25)
@given(
    seq_lens=st.lists(st.integers(0, 200_000), min_size=1, max_size=150),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    multiprocessors=st.sampled_from([8, 80, 132]),
    window=st.sampled_from([0, 100, 4096]),
)
def test_a_plan_names_every_piece_of_every_row_once(
    seq_lens: list[int], num_kv_heads: int, multiprocessors: int, window: int
) -> None:
    plan = plan_of(
        seq_lens, num_kv_heads=num_kv_heads, multiprocessors=multiprocessors, window=window
    )

    starts = plan.piece_start.tolist()
    total = starts[-1]
    assert starts[0] == 0
    assert total <= len(plan.piece_row)
    counts = plan.piece_start.diff()
    assert counts.min() >= 1
    expected = torch.repeat_interleave(torch.arange(len(seq_lens), dtype=torch.int32), counts)
    assert torch.equal(plan.piece_row[:total], expected)
    assert (plan.piece_row[total:] == -1).all()


def test_work_is_cut_by_length_and_not_by_number() -> None:
    places = 2 * 132
    alone = plan_of([32_768])
    assert num_rounds(alone, [32_768], 8, places) <= 1.3 * 32_768 / 64 * 8 / places
    many = plan_of([1024] * 256)
    assert many.piece_start[-1] == 256, "enough programs need no pieces"
    skewed = [1024] * 31 + [32_768]
    fair = sum(skewed) / 64 * 8 / places
    assert num_rounds(plan_of(skewed), skewed, 8, places) <= 2 * fair
    assert plan_of([32_768], window=1000).piece_start[-1] <= 17, "a window bounds what is cut"
