"""Paged attention on the CPU: exact, blind to what it must not see, and to its company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.base import AttentionBackend
from tests.kernels.cpu_kernels import compiled
from tests.kernels.ragged import Options, Shape, Step, make_step

MIX = [(1, 1), (1, 75), (1, 600), (3, 3), (19, 283), (34, 34)]
"""Decodes at the very start and past two spans; a short prompt; a chunk; a longer prompt."""


def backend(num_threads: int = 2) -> AttentionBackend:
    return compiled(num_threads).attention


def assert_exact(step: Step, options: Options) -> Tensor:
    out = step.attend(backend(), options)
    torch.testing.assert_close(out.double(), step.exact(options), atol=1e-5, rtol=1e-5)
    return out


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1), (40, 1)])
def test_a_mixed_step_is_exact_for_any_group_and_block_size(
    block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)

    assert_exact(make_step(backend(), shape, MIX, padding=2), Options())


@pytest.mark.parametrize("head_dim", [16, 48, 80, 128, 256])
def test_a_mixed_step_is_exact_for_every_head_dim(head_dim: int) -> None:
    step = make_step(backend(), Shape(head_dim=head_dim), MIX)

    assert_exact(step, Options(scale=head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 7, 40, 256, 300, 1000])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_window_hides_what_lies_before_it(window: int, block_size: int) -> None:
    step = make_step(backend(), Shape(num_heads=6, num_kv_heads=2, block_size=block_size), MIX)

    assert_exact(step, Options(window=window))


def test_softcap_and_sinks() -> None:
    step = make_step(backend(), Shape(num_heads=6, num_kv_heads=2), MIX)

    assert_exact(step, Options(softcap=3.0))
    assert_exact(step, Options(sinks=torch.linspace(-2, 4, 6)))
    assert_exact(step, Options(softcap=3.0, sinks=torch.linspace(-2, 4, 6), window=50))


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 700)), min_size=1, max_size=6),
    window=st.sampled_from([None, 1, 33, 256, 400]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    seed=st.integers(0, 2**31),
)
def test_any_ragged_step_is_exact_and_each_request_has_the_bits_it_has_alone(
    lens: list[tuple[int, int]], window: int | None, block_size: int, seed: int
) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=32, block_size=block_size)
    step = make_step(backend(), shape, [(q, q + before) for q, before in lens], seed=seed)
    options = Options(window=window)

    out = assert_exact(step, options)

    assert torch.equal(step.attend(backend(1), options), out)
    for request, alone in enumerate(requests_alone(step)):
        own = slice(*step.meta.query_start_loc[request : request + 2].tolist())
        assert torch.equal(alone.attend(backend(), options), out[own])


def requests_alone(step: Step) -> list[Step]:
    """Every request of the step as a step of its own, over the same cache."""
    meta = step.meta
    alone = []
    for request, query_len in enumerate(meta.query_lens_host):
        start = int(meta.query_start_loc[request])
        seq_len = meta.seq_lens_host[request]
        own = replace(
            meta,
            query_start_loc=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens=meta.seq_lens[request : request + 1],
            block_table=meta.block_table[request : request + 1],
            max_query_len=query_len,
            max_seq_len=seq_len,
            query_lens_host=[query_len],
            seq_lens_host=[seq_len],
        )
        alone.append(replace(step, query=step.query[start : start + query_len], meta=own))
    return alone


@pytest.mark.parametrize("window", [None, 100])
def test_chunking_a_prompt_changes_no_bit(window: int | None) -> None:
    options = Options(window=window)
    shape = Shape(num_heads=9, num_kv_heads=3)
    step = make_step(backend(), shape, [(700, 700)])
    whole = step.attend(backend(), options)

    cuts = sorted(random.Random(1).sample(range(1, 700), 12))
    for first, last in zip([0, *cuts], [*cuts, 700], strict=True):
        meta = replace(
            step.meta,
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
        )
        chunk = replace(step, query=step.query[first:last], meta=meta)
        assert torch.equal(chunk.attend(backend(), options), whole[first:last])


def test_queries_keys_and_values_may_be_slices_of_fused_qkv() -> None:
    step = make_step(backend(), Shape(num_heads=4, num_kv_heads=2), [(1, 1), (5, 5)])
    fused = torch.randn(6, 4 + 2 + 2, 64)
    query, key, value = fused.split([4, 2, 2], dim=1)
    kv = torch.full_like(step.kv, float("nan"))
    backend().write_kv(key, value, kv, step.meta.slot_mapping)
    sliced = replace(
        step, query=query, keys=list(key.split([1, 5])), values=list(value.split([1, 5])), kv=kv
    )

    assert_exact(sliced, Options())


def test_a_value_that_is_not_finite_stays_with_the_tokens_that_see_it() -> None:
    step = make_step(backend(), Shape(), [(40, 40)])
    clean = step.attend(backend(), Options())
    slot = step.meta.slot_mapping[25:26]
    bad = torch.full((1, 1, 64), float("inf"))
    backend().write_kv(bad, bad, step.kv, slot)

    poisoned = step.attend(backend(), Options())

    assert torch.equal(poisoned[:25], clean[:25])
    assert not poisoned[25:].isfinite().all()
