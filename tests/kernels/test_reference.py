"""The reference operations against formulas in fp64, and their independence of company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels import reference
from serve.kernels.stored import Dense
from tests.kernels.ragged import Options, Shape, make_step, relative_error

BACKEND = reference.ReferenceAttention()
MIXED = [(1, 9), (1, 1), (7, 20), (33, 33), (5, 300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_a_mixed_step_is_exact(dtype: torch.dtype, head_dim: int) -> None:
    step = make_step(BACKEND, Shape(head_dim=head_dim, dtype=dtype), MIXED, padding=2)

    out = step.attend(BACKEND, Options())

    assert out.dtype == dtype
    assert relative_error(out, step.exact(Options())) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_head_grouping_and_block_size(heads: tuple[int, int], block_size: int) -> None:
    shape = Shape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=16, block_size=block_size)
    step = make_step(BACKEND, shape, MIXED)

    assert relative_error(step.attend(BACKEND, Options()), step.exact(Options())) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        Options(window=1),
        Options(window=6),
        Options(window=1000),
        Options(softcap=2.0),
        Options(sinks=torch.tensor([-1.0, 0.5, 2.0, 9.0])),
        Options(scale=0.7, window=20, softcap=1.5, sinks=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    ],
    ids=repr,
)
def test_windows_softcaps_and_sinks(options: Options) -> None:
    step = make_step(BACKEND, Shape(num_kv_heads=2), MIXED)

    assert relative_error(step.attend(BACKEND, options), step.exact(options)) < 1e-6


@settings(max_examples=20, deadline=None)
@given(
    seq_len=st.integers(1, 400),
    chunk=st.integers(1, 90),
    window=st.sampled_from([None, 40]),
    shape=st.sampled_from([(9, 3, 64), (4, 4, 32), (4, 1, 256)]),
)
def test_a_tokens_result_is_the_same_bit_for_bit_however_its_prompt_is_chunked(
    seq_len: int, chunk: int, window: int | None, shape: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    random = torch.Generator().manual_seed(seq_len)
    query = torch.randn(seq_len, num_heads, head_dim, generator=random)
    key, value = torch.randn(2, num_kv_heads, seq_len, head_dim, generator=random)

    def attend(start: int, end: int) -> torch.Tensor:
        return reference._attend_one(
            query[start:end],
            key[:, :end],
            value[:, :end],
            scale=0.125,
            window=window,
            softcap=None,
            sinks=None,
        )

    starts = list(range(0, seq_len, chunk))[-12:]
    whole = attend(0, seq_len)[starts[0] :]
    parts = torch.cat([attend(start, min(start + chunk, seq_len)) for start in starts])
    assert torch.equal(whole, parts)


def test_a_requests_result_does_not_depend_on_its_neighbours() -> None:
    together = make_step(BACKEND, Shape(), MIXED)
    start, end = together.meta.query_start_loc[3:5].tolist()
    alone = reference._attend_one(
        together.query[start:end],
        together.keys[3].transpose(0, 1),
        together.values[3].transpose(0, 1),
        scale=0.125,
        window=None,
        softcap=None,
        sinks=None,
    )

    assert torch.equal(together.attend(BACKEND, Options())[start:end], alone)


def test_new_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    kv = torch.zeros(BACKEND.kv_shape(4, 2, 3, 5))
    heads = torch.randn(2, 4, 3, 5)  # as slices of a larger projection: not contiguous

    BACKEND.write_kv(heads[0, ::2], heads[1, ::2], kv, torch.tensor([7, 2]))

    slots = kv.view(2, 8, 3, 5)
    assert torch.equal(slots[:, 7], heads[:, 0])
    assert torch.equal(slots[:, 2], heads[:, 2])
    assert slots[:, [0, 1, 3, 4, 5, 6]].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_divide_by_the_root_mean_square(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 33).to(dtype)
    weight = torch.randn(33)

    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)

    exact = (x + residual).double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.equal(total, x + residual)
    assert normed.dtype == dtype
    assert relative_error(normed, exact) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotation_turns_pairs_half_a_rotation_apart(rotary_dim: int) -> None:
    angles = torch.rand(10, rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query, key = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    positions = torch.tensor([9, 0, 4])

    results = reference.rotary(query, key, cos_sin, positions)

    for x, rotated in zip((query, key), results, strict=True):
        pairs = torch.complex(x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim])
        turned = pairs * torch.polar(torch.ones(3, 1, rotary_dim // 2), angles[positions][:, None])
        expected = torch.cat([turned.real, turned.imag, x[..., rotary_dim:]], dim=-1)
        assert torch.allclose(rotated, expected, atol=1e-6)


def test_gated_activations_are_the_named_ones() -> None:
    gate_up = torch.randn(4, 14)
    gate, up = gate_up[:, :7], gate_up[:, 7:]

    assert torch.equal(reference.gated_act(gate_up, "silu"), F.silu(gate) * up)
    expected = F.gelu(gate, approximate="tanh") * up
    assert torch.equal(reference.gated_act(gate_up, "gelu_tanh"), expected)
    with pytest.raises(ValueError, match="relu"):
        reference.gated_act(gate_up, "relu")


@pytest.mark.parametrize("sizes", [(64, 32), (7, 13), (1, 1), (33, 5), (1, 48)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_is_linear(
    sizes: tuple[int, int], with_bias: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(sizes).to(dtype)
    bias = torch.randn(sizes[0]).to(dtype) if with_bias else None
    linear = reference.pack_invariant_linear([Dense(weight)], bias)

    for rows in (0, 1, 2, 17):
        x = torch.randn(rows, sizes[1]).to(dtype)
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert linear(x).dtype == dtype
        assert linear(x).shape == (rows, sizes[0])
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert torch.allclose(linear(x).float(), expected, atol=tolerance)


@pytest.mark.parametrize("onednn_can", [True, False])
def test_rows_of_a_packed_linear_do_not_depend_on_their_number(
    onednn_can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not onednn_can:  # as with torch 2.11
        monkeypatch.setattr(reference, "_onednn_rows_are_invariant", lambda: False)
    linear = reference.pack_invariant_linear([Dense(torch.randn(96, 64))], torch.randn(96))
    x = torch.randn(40, 64)

    whole = linear(x)

    for rows in (1, 2, 3, 5, 16, 39):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_copied_blocks_are_read_before_any_is_written() -> None:
    kv = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
    before = kv.clone()

    reference.copy_blocks(kv, kv, torch.tensor([1, 2]), torch.tensor([2, 3]))

    assert torch.equal(kv[:, [2, 3]], before[:, [1, 2]])
    assert torch.equal(kv[:, [0, 1]], before[:, [0, 1]])
