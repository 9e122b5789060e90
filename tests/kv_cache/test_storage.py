from __future__ import annotations

import pytest
import torch

from serve.kernels import reference
from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.storage import KVStorage, Tier, block_bytes


def _shape(num_blocks: int, heads: int = 3) -> tuple[int, ...]:
    return reference.kernels().attention.kv_shape(num_blocks, 4, heads, 8)


def make_storage(num_blocks: int = 6, num_host_blocks: int = 5) -> KVStorage:
    return KVStorage(
        [_shape, lambda n: _shape(n, heads=1)],
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        dtype=torch.float32,
        allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        copy_blocks=reference.kernels().copy_blocks,
        allocate_host=lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype),
    )


def fill(storage: KVStorage) -> list[torch.Tensor]:
    """Different numbers everywhere; returns copies of them."""
    generator = torch.Generator().manual_seed(0)
    for layer in storage.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return [layer.clone() for layer in storage.layers]


def pairs(**blocks: int) -> list[BlockCopy]:
    return [BlockCopy(int(src[1:]), dst) for src, dst in blocks.items()]


def test_the_null_block_comes_on_top_of_the_usable_ones_and_layers_keep_their_own_shapes() -> None:
    storage = make_storage(num_blocks=6)
    assert [layer.shape[:2] for layer in storage.layers] == [(2, 7), (2, 7)]
    assert storage.layers[0].shape != storage.layers[1].shape
    assert all(not layer.any() for layer in storage.layers)


def test_blocks_survive_a_round_trip_through_the_host_tier_to_other_ids() -> None:
    storage = make_storage()
    before = fill(storage)
    storage.copy(pairs(b2=5, b6=1, b3=2), src=Tier.DEVICE, dst=Tier.HOST)
    for layer in storage.layers:
        layer.fill_(7.0)
    storage.copy(pairs(b5=1, b1=4, b2=6), src=Tier.HOST, dst=Tier.DEVICE)
    for layer, old in zip(storage.layers, before, strict=True):
        assert torch.equal(layer[:, [1, 4, 6]], old[:, [2, 6, 3]])
        assert (layer[:, [0, 2, 3, 5]] == 7.0).all()


def test_copies_within_the_device_read_before_they_write() -> None:
    storage = make_storage()
    before = fill(storage)
    storage.copy(pairs(b1=2, b2=3, b3=1), src=Tier.DEVICE, dst=Tier.DEVICE)
    for layer, old in zip(storage.layers, before, strict=True):
        assert torch.equal(layer[:, [2, 3, 1]], old[:, [1, 2, 3]])
        assert torch.equal(layer[:, [0, 4, 5, 6]], old[:, [0, 4, 5, 6]])


def test_no_copies_need_no_host_tier_but_a_swap_without_one_is_a_bug() -> None:
    storage = make_storage(num_host_blocks=0)
    storage.copy([], src=Tier.DEVICE, dst=Tier.HOST)
    with pytest.raises(AssertionError, match="host tier"):
        storage.copy(pairs(b1=1), src=Tier.DEVICE, dst=Tier.HOST)


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    shapes = [_shape, lambda n: _shape(n, heads=1)]
    assert block_bytes(shapes, torch.float32) == 2 * 4 * 8 * (3 + 1) * 4
    assert block_bytes(shapes, torch.bfloat16) == 2 * 4 * 8 * (3 + 1) * 2


def test_layers_of_one_shape_share_memory_and_are_copied_by_one_call() -> None:
    calls = []

    def counted(src: torch.Tensor, dst: torch.Tensor, *ids: torch.Tensor) -> None:
        calls.append(src.shape[0])
        reference.copy_blocks(src, dst, *ids)

    wide, narrow = _shape, lambda n: _shape(n, heads=1)
    storage = KVStorage(
        [wide, narrow, wide, wide],
        num_blocks=3,
        num_host_blocks=2,
        dtype=torch.float32,
        allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        copy_blocks=counted,
        allocate_host=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    )
    before = fill(storage)

    storage.copy(pairs(b3=1), src=Tier.DEVICE, dst=Tier.HOST)
    storage.copy(pairs(b1=2), src=Tier.HOST, dst=Tier.DEVICE)

    assert calls == [2 * 3, 2 * 1] * 2, "keys and values of three layers, and of one"
    for layer, old in zip(storage.layers, before, strict=True):
        assert torch.equal(layer[:, 2], old[:, 3])


def test_an_eight_bit_cache_is_copied_like_any_other() -> None:
    storage = KVStorage(
        [_shape],
        num_blocks=3,
        num_host_blocks=2,
        dtype=torch.float8_e4m3fn,
        allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        copy_blocks=reference.copy_blocks,
        allocate_host=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        scales=[torch.ones(2, 3)],
    )
    bits = storage.layers[0].view(torch.uint8)
    bits.copy_(torch.arange(bits.numel()).view(bits.shape) % 100)

    storage.copy(pairs(b3=1), src=Tier.DEVICE, dst=Tier.DEVICE)

    assert torch.equal(bits[:, 1], bits[:, 3])
    assert storage.scales is not None
