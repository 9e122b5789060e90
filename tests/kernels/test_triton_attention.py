"""The ragged kernel, interpreted, against exact attention and against its torch twin."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import reference
from serve.kernels.triton import triton_kernels
from tests.kernels.interpreter import exact_dots
from tests.kernels.ragged import Options, Shape, make_step, relative_error, together

MIX = [(1, 1), (1, 75), (3, 3), (19, 83), (34, 34)]
"""Decodes at the very start and past two tiles; a short prompt; a chunk; a longer prompt."""

ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

BACKEND = triton_kernels().attention


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_mixed_step_is_exact_for_every_head_dim_and_dtype(
    head_dim: int, dtype: torch.dtype
) -> None:
    step = make_step(BACKEND, Shape(head_dim=head_dim, dtype=dtype), MIX, seed=head_dim)
    options = Options(scale=head_dim**-0.5)

    out = step.attend(BACKEND, options)

    assert out.dtype == dtype
    assert relative_error(out, step.exact(options)) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads"),
    [(8, 2, 2), (16, 6, 2), (32, 4, 1), (64, 8, 1), (16, 7, 1), (8, 96, 1)],
)
def test_any_group_of_query_heads_and_any_block_size(
    block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)
    step = make_step(BACKEND, shape, MIX, seed=block_size)

    out = step.attend(BACKEND, Options())

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 40, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    step = make_step(BACKEND, Shape(), [(1, 75), (3, 3), (40, 100)])

    out = step.attend(BACKEND, Options(window=window))

    exact = step.exact(Options(window=window))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_blocks_before_the_window_are_never_read() -> None:
    step = make_step(BACKEND, Shape(block_size=8), [(1, 150), (3, 150)])
    step.meta.block_table[:, : (150 - 3 - 20) // 8] = 0  # the null block holds NaN

    out = step.attend(BACKEND, Options(window=20))

    exact = step.exact(Options(window=20))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        Options(softcap=5.0),
        Options(sinks=torch.tensor([-3.0, 0.0, 2.0, 60.0])),
        Options(softcap=20.0, window=33, sinks=torch.tensor([1.0, -1.0, 4.0, 0.5])),
        Options(scale=2.0),
    ],
    ids=["softcap", "sinks", "all together", "peaked"],
)
def test_softcap_sinks_and_peaked_scores(options: Options) -> None:
    step = make_step(BACKEND, Shape(), MIX, seed=7)

    out = step.attend(BACKEND, options)

    torch.testing.assert_close(out.double(), step.exact(options), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "options", [Options(), Options(window=30, softcap=8.0)], ids=["plain", "all"]
)
def test_it_equals_its_torch_twin(options: Options) -> None:
    twin = reference.ReferenceAttention()

    out = make_step(BACKEND, Shape(), MIX, seed=3).attend(BACKEND, options)
    expected = make_step(twin, Shape(), MIX, seed=3).attend(twin, options)

    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_many_short_requests_find_their_own_tiles() -> None:
    lens = [(1, 1 + row) for row in range(5)] + [(2 + row % 5, 8 + row) for row in range(6)]
    step = make_step(BACKEND, Shape(num_heads=12), lens, padding=3)

    out = step.attend(BACKEND, Options())

    torch.testing.assert_close(out.double(), step.exact(Options()), atol=1e-5, rtol=1e-5)


def test_a_slice_of_a_fused_projection_is_a_valid_query() -> None:
    step = make_step(BACKEND, Shape(), MIX)
    fused = torch.full((step.query.shape[0], 6, 64), float("nan"))
    fused[:, :4] = step.query

    out = BACKEND.attend(fused[:, :4], step.kv, step.meta, scale=0.125)

    torch.testing.assert_close(out, step.attend(BACKEND, Options()), atol=0, rtol=0)


def test_padding_rows_of_a_captured_step_leave_the_others_alone() -> None:
    step = make_step(BACKEND, Shape(), [(1, 20), (1, 33)])
    exact = step.exact(Options())
    meta = step.meta
    padded = type(meta)(
        query_start_loc=torch.arange(5, dtype=torch.int32),
        seq_lens=torch.tensor([20, 33, 0, 0], dtype=torch.int32),
        block_table=torch.cat([meta.block_table, torch.zeros_like(meta.block_table)]),
        slot_mapping=torch.cat([meta.slot_mapping, torch.zeros(2, dtype=torch.int64)]),
        num_decode_rows=4,
        max_query_len=1,
        max_seq_len=33,
        query_lens_host=[1, 1, 1, 1],
        seq_lens_host=[20, 33, 0, 0],
    )

    out = BACKEND.attend(step.query.repeat(2, 1, 1), step.kv, padded, scale=0.125)

    torch.testing.assert_close(out[:2].double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(out[2:]).all()


@pytest.mark.parametrize("options", [Options(), Options(window=40)], ids=["plain", "window"])
def test_batch_invariant_results_do_not_depend_on_company_or_chunks(options: Options) -> None:
    backend = triton_kernels(batch_invariant=True).attention
    whole = make_step(backend, Shape(), [(90, 90)])
    company = make_step(backend, Shape(), [(1, 70), (5, 9)], seed=1)

    with exact_dots():
        expected = whole.attend(backend, options)
        for lens in ([37, 53], [1, 64, 24, 1]):
            start = 0
            for length in lens:
                step = together(whole.part(start, start + length), company)
                out = step.attend(backend, options)
                place = step.meta.query_lens_host[:-1]
                torch.testing.assert_close(
                    out[sum(place) :], expected[start : start + length], atol=0, rtol=0
                )
                start += length


def test_a_step_without_tokens_is_an_empty_result() -> None:
    step = make_step(BACKEND, Shape(), [(1, 3)])

    assert BACKEND.attend(step.query[:0], step.kv, step.meta, scale=1.0).shape == (0, 4, 64)


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: {"query": step.query.half()},
        lambda step: {"query": step.query.transpose(1, 2).contiguous().transpose(1, 2)},
        lambda step: {"kv": step.kv[:, :, :, :12]},
        lambda step: {"query": step.query[:, :3]},
        lambda step: {"kv": step.kv.transpose(2, 3)},
    ],
    ids=["dtype", "strides", "block size", "group", "layout"],
)
def test_the_launcher_refuses_what_the_kernel_cannot_read(damage: object) -> None:
    step = make_step(BACKEND, Shape(num_kv_heads=2), [(2, 5)])
    tensors = {"query": step.query, "kv": step.kv, **damage(step)}

    with pytest.raises(AssertionError):
        BACKEND.attend(tensors["query"], tensors["kv"], step.meta, scale=1.0)
