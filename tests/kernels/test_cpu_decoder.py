"""A whole decoder in one call gives the bits of its single operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from torch import Tensor

from serve.kernels.base import DecoderParts, ForwardContext, GatedParts, LayerParts, PackedLinear
from serve.kernels.stored import Blocks, Dense, StoredMatrix
from serve.models.layers import LayerByLayer
from tests.kernels.cpu_kernels import compiled
from tests.kernels.ragged import Shape, make_step

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 80, 4, 2, 16
LENS = [(1, 40), (1, 1), (5, 5), (30, 300)]
MAX_LEN = 512


def layer(seed: int, *, gemma: bool, window: int | None, rope: int) -> LayerParts:
    random = torch.Generator().manual_seed(seed)
    pack_parts = compiled().pack_linear

    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return pack_parts([Dense(weight)], bias)

    def weight(*size: int) -> Tensor:
        return torch.randn(*size, generator=random) / size[-1] ** 0.5

    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return LayerParts(
        qkv=pack(weight(width, HIDDEN), weight(width)),
        output=pack(weight(HIDDEN, HEADS * HEAD_DIM), None),
        mlp=GatedParts(
            gate_up=pack(weight(2 * INTERMEDIATE, HIDDEN).half(), None),
            down=pack(weight(HIDDEN, INTERMEDIATE), None),
        ),
        before_attention=weight(HIDDEN),
        query_norm=weight(HEAD_DIM) if gemma else None,
        key_norm=weight(HEAD_DIM) if gemma else None,
        after_attention=weight(HIDDEN) if gemma else None,
        before_mlp=weight(HIDDEN),
        after_mlp=weight(HIDDEN) if gemma else None,
        window=window,
        rope=rope,
    )


def decoder(*, gemma: bool) -> DecoderParts:
    return DecoderParts(
        layers=[
            layer(1, gemma=gemma, window=None, rope=0),
            layer(2, gemma=gemma, window=20, rope=1),
        ],
        final_norm=torch.randn(HIDDEN),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        activation="gelu_tanh" if gemma else "silu",
        eps=1e-6,
        scale=HEAD_DIM**-0.5,
        softcap=20.0 if gemma else None,
    )


def context(lens: list[tuple[int, int]]) -> ForwardContext:
    """A step over a cache in which earlier positions are filled already."""
    shape = Shape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    step = make_step(compiled().attention, shape, lens)
    positions = [torch.arange(seq_len - query_len, seq_len) for query_len, seq_len in lens]
    return ForwardContext([step.kv.clone(), step.kv.clone()], step.meta, torch.cat(positions))


def ropes(positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    tables = []
    for theta in (1e4, 1e6):
        frequencies = theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(MAX_LEN).float(), frequencies)
        tables.append((torch.cat([angles.cos(), angles.sin()], dim=-1), positions))
    return tables


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("lens", [LENS, [(1, 7)]])
def test_fused_layers_have_the_bits_of_single_operations(
    gemma: bool, lens: list[tuple[int, int]]
) -> None:
    kernels = compiled()
    assert kernels.fuse_decoder is not None
    parts = decoder(gemma=gemma)
    fused, single = context(lens), context(lens)
    hidden = torch.randn(len(fused.positions), HIDDEN)

    ours = kernels.fuse_decoder(parts)(hidden.clone(), ropes(fused.positions), fused)
    theirs = LayerByLayer(parts, kernels)(hidden.clone(), ropes(single.positions), single)

    assert torch.equal(ours, theirs)
    for fused_kv, single_kv in zip(fused.kv, single.kv, strict=True):
        assert torch.equal(fused_kv.nan_to_num(), single_kv.nan_to_num())


def stored_as(dtype: torch.dtype) -> Callable[[Tensor], StoredMatrix]:
    return lambda weight: Dense(weight.to(dtype))


def quantized(weight: Tensor) -> StoredMatrix:
    return Blocks("Q8_0", torch.from_numpy(quantize(weight.numpy(), Kind.Q8_0)))


FORMS = [*map(stored_as, (torch.float32, torch.float16, torch.bfloat16)), quantized]


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 70])
@pytest.mark.parametrize("intermediate", [80, 72, 16])  # 72: the halves do not fill panels
@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("biased", [False, True])
def test_gating_as_one_multiplies_has_the_bits_of_gating_afterwards(
    num_tokens: int, intermediate: int, stored: Callable[[Tensor], StoredMatrix], biased: bool
) -> None:
    kernels = compiled()
    assert kernels.fuse_decoder is not None
    parts = decoder(gemma=False)
    weight = stored(torch.randn(2 * intermediate, HIDDEN))
    changed = replace(
        parts.layers[0],
        mlp=GatedParts(
            kernels.pack_linear([weight], torch.randn(2 * intermediate) if biased else None),
            kernels.pack_linear([Dense(torch.randn(HIDDEN, intermediate))], None),
        ),
    )
    parts = replace(parts, layers=[changed])
    fused, single = context([(num_tokens, num_tokens)]), context([(num_tokens, num_tokens)])
    hidden = torch.randn(num_tokens, HIDDEN)

    ours = kernels.fuse_decoder(parts)(hidden.clone(), ropes(fused.positions), fused)
    theirs = LayerByLayer(parts, kernels)(hidden.clone(), ropes(single.positions), single)

    assert torch.equal(ours, theirs)


def test_a_layer_of_another_kind_is_not_fused_but_served_operation_by_operation() -> None:
    kernels, parts = compiled(), decoder(gemma=False)
    assert kernels.fuse_decoder is not None
    gated = parts.layers[1].mlp
    assert isinstance(gated, GatedParts)

    def other(hidden: Tensor) -> Tensor:
        return gated.down(kernels.gated_act(gated.gate_up(hidden), parts.activation))

    mixed = replace(parts, layers=[parts.layers[0], replace(parts.layers[1], mlp=other)])
    assert kernels.fuse_decoder(mixed) is None
    ours, theirs, hidden = context(LENS), context(LENS), torch.randn(37, HIDDEN)
    found = LayerByLayer(mixed, kernels)(hidden.clone(), ropes(ours.positions), ours)
    expected = LayerByLayer(parts, kernels)(hidden.clone(), ropes(theirs.positions), theirs)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("wanted", [[1], [0, 6], [1, 4, 20, 36], [], list(range(37))])
def test_leaving_out_tokens_changes_no_bit_of_the_others_nor_of_the_cache(
    gemma: bool, wanted: list[int]
) -> None:
    kernels = compiled()
    assert kernels.fuse_decoder is not None
    run = kernels.fuse_decoder(decoder(gemma=gemma))
    every, some = context(LENS), context(LENS)
    hidden = torch.randn(37, HIDDEN)
    indices = torch.tensor(wanted, dtype=torch.int64)

    expected = run(hidden.clone(), ropes(every.positions), every)
    found = run(hidden.clone(), ropes(some.positions), replace(some, logits_indices=indices))

    assert torch.equal(found, expected[indices])
    for some_kv, every_kv in zip(some.kv, every.kv, strict=True):
        assert torch.equal(some_kv.nan_to_num(), every_kv.nan_to_num())


def test_a_prompt_in_chunks_has_the_bits_of_a_whole_one_on_any_number_of_threads() -> None:
    parts = decoder(gemma=False)
    hidden = torch.randn(100, HIDDEN)
    whole, chunked = context([(100, 100)]), context([(100, 100)])
    fuse, fuse_alone = compiled().fuse_decoder, compiled(1).fuse_decoder
    assert fuse is not None
    assert fuse_alone is not None
    expected = fuse(parts)(hidden.clone(), ropes(whole.positions), whole)

    run = fuse_alone(parts)
    outputs = []
    for first, last in [(0, 1), (1, 40), (40, 41), (41, 100)]:
        meta = replace(
            chunked.attention,
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            slot_mapping=chunked.attention.slot_mapping[first:last],
        )
        step = ForwardContext(chunked.kv, meta, torch.arange(first, last))
        outputs.append(run(hidden[first:last].clone(), ropes(step.positions), step))

    assert torch.equal(torch.cat(outputs), expected)


def test_a_decoder_follows_when_it_is_given_another_cache() -> None:
    fuse = compiled().fuse_decoder
    assert fuse is not None
    run = fuse(decoder(gemma=False))
    first, second = context(LENS), context(LENS)
    hidden = torch.randn(len(first.positions), HIDDEN)

    outputs = [run(hidden.clone(), ropes(step.positions), step) for step in (first, second, first)]

    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for one, other in zip(first.kv, second.kv, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
