"""Blocks in a file: they come back bit for bit, or not at all."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kv_cache.storage import KVStorage
from serve.worker.block_file import HASH_BYTES, BlockFile
from serve.worker.executor import BlocksUnusable
from tests.kv_cache.test_storage import fill, make_storage

IDENTITY = {"model": "m", "dtype": "float32"}
HASHES = [bytes([i]) * HASH_BYTES for i in range(3)]


def block_file(storage: KVStorage, **changes: str) -> BlockFile:
    return BlockFile(storage, {**IDENTITY, **changes}, lambda: None)


def written(path: Path) -> tuple[Path, list[torch.Tensor]]:
    """A file with blocks 2, 5 and 1 of a storage, and what that held."""
    storage = make_storage()
    before = fill(storage)
    size = block_file(storage).write(path, HASHES, [2, 5, 1])
    assert size == path.stat().st_size
    return path, before


def test_blocks_come_back_bit_for_bit_under_other_ids(tmp_path: Path) -> None:
    path, before = written(tmp_path / "cache.safetensors")
    other = make_storage(num_blocks=9)
    file = block_file(other)
    assert file.read_hashes(path) == HASHES
    file.read(path, [7, 1])  # the first ones, if there is no room for more
    for layer, old in zip(other.layers, before, strict=True):
        assert torch.equal(layer[:, 7], old[:, 2])
        assert torch.equal(layer[:, 1], old[:, 5])
        assert not layer[:, [0, 2, 3, 4, 5, 6, 8, 9]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_dtype_of_a_cache_can_be_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    def storage() -> KVStorage:
        return KVStorage(
            [lambda n: (2, n, 4, 8)],
            num_blocks=4,
            num_host_blocks=0,
            dtype=dtype,
            allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
            copy_blocks=lambda *args: None,
            allocate_host=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        )

    old, new = storage(), storage()
    old.layers[0].view(torch.uint8).random_(0, 120)
    block_file(old).write(tmp_path / "f", HASHES, [1, 2, 3])
    assert block_file(new).read_hashes(tmp_path / "f") == HASHES
    block_file(new).read(tmp_path / "f", [3, 2, 1])
    swapped = old.layers[0].view(torch.uint8)[:, [1, 2, 3]]
    assert torch.equal(new.layers[0].view(torch.uint8)[:, [3, 2, 1]], swapped)


def test_sec_51_what_clients_said_is_for_us_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    path.touch(0o644)
    written(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "f")
    with pytest.raises(BlocksUnusable, match="its dtype is float32, not bfloat16"):
        block_file(make_storage(), dtype="bfloat16").read_hashes(path)
    other_shape = make_storage()
    other_shape.layers = other_shape.layers[::-1]
    with pytest.raises(BlocksUnusable, match=r"the shape of layers\.0"):
        block_file(other_shape).read_hashes(path)
    fewer_layers = make_storage()
    fewer_layers.layers = [*fewer_layers.layers, fewer_layers.layers[0]]
    with pytest.raises(BlocksUnusable, match=r"no layers\.2"):
        block_file(fewer_layers).read_hashes(path)


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, place: float, flip: int
) -> None:
    path, before = written(tmp_path_factory.mktemp("f") / "f")
    data = bytearray(path.read_bytes())
    position = int(place * len(data))
    data[position] ^= flip
    path.write_bytes(data)
    storage = make_storage()
    file = block_file(storage)
    try:
        assert file.read_hashes(path) == HASHES
        file.read(path, [1, 2, 3])
    except BlocksUnusable:
        return
    # Only what nobody reads may have changed unnoticed: blanks at the header's end.
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert torch.equal(storage.layers[0][:, 1], before[0][:, 2])


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    path, _ = written(tmp_path_factory.mktemp("f") / "f")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    file = block_file(make_storage())
    with pytest.raises(BlocksUnusable):
        file.read_hashes(path)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "f")
    old = path.read_bytes()
    storage = make_storage()
    with pytest.raises(RuntimeError, match="out of DATA bounds"):
        block_file(storage).write(path, HASHES, [1, 2, 1000])
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
