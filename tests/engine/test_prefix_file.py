"""The prefix cache outlives an engine, in a file that is never worth a crash."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.config import CacheConfig
from serve.engine.prefix_file import PrefixFile
from serve.errors import ConfigError
from serve.kv_cache.manager import KVCacheManager
from serve.kv_cache.pins import Pin
from serve.kv_cache.prefix_index import BlockHashes
from serve.worker.executor import BlocksUnusable
from tests.e2e.tiny_model import save_tiny_model
from tests.test_llm import SETTINGS

PROMPT = [(7 * i) % 90 + 3 for i in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class FakeArchive:
    """Keeps what was written; `fails` with BlocksUnusable when blocks are read."""

    def __init__(self, *, fails: bool = False, full: bool = False) -> None:
        self.fails, self.full = fails, full
        self.hashes: list[bytes] = []
        self.filled: list[int] = []

    def write_blocks(self, path: Path, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        if self.full:
            raise OSError("no space left on device")
        self.hashes = list(hashes)
        path.touch()
        return 1

    def read_hashes(self, path: Path) -> list[bytes]:
        return self.hashes

    def read_blocks(self, path: Path, block_ids: Sequence[int]) -> None:
        if self.fails:
            raise BlocksUnusable("layers.3 is damaged")
        self.filled = list(block_ids)


def manager(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, 2, 0, enable_prefix_caching=True, max_pinned_blocks=2)


def chain(*token_ids: int) -> BlockHashes:
    hashes = BlockHashes(2)
    hashes.extend(token_ids)
    return hashes


def compute(kv: KVCacheManager, name: str, *token_ids: int) -> None:
    assert kv.grow(name, len(token_ids)) is not None
    kv.commit(name, chain(*token_ids), len(token_ids))
    kv.free(name)


def test_a_smaller_pool_takes_what_was_used_last_and_beginnings_first(tmp_path: Path) -> None:
    old, archive = manager(), FakeArchive()
    compute(old, "a", 1, 1, 2, 2, 3, 3)
    compute(old, "b", 4, 4, 5, 5, 6, 6)
    PrefixFile(tmp_path / "f", old, archive).save()
    new = manager(num_blocks=5)
    PrefixFile(tmp_path / "f", new, archive).load()
    assert len(archive.filled) == 5
    assert len(new.match_prefix(chain(4, 4, 5, 5, 6, 6), 6)) == 3
    assert len(new.match_prefix(chain(1, 1, 2, 2, 3, 3), 6)) == 2
    new.check_invariants()
    assert (new.num_blocks_free, new.num_blocks_used) == (5, 0)
    compute(new, "c", 9, 9)  # takes the block that is least wanted
    assert len(new.match_prefix(chain(1, 1, 2, 2, 3, 3), 6)) == 1
    assert len(new.match_prefix(chain(4, 4, 5, 5, 6, 6), 6)) == 3


def test_pinned_and_held_blocks_come_first(tmp_path: Path) -> None:
    kv, archive = manager(), FakeArchive()
    compute(kv, "old", 1, 1)
    kv.prefixes.pin(Pin("p", tuple(chain(1, 1).values)))
    compute(kv, "new", 2, 2)
    PrefixFile(tmp_path / "f", kv, archive).save()
    assert archive.hashes == [*chain(1, 1).values, *chain(2, 2).values]


def test_a_damaged_file_is_a_warning_and_an_empty_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, archive = manager(), FakeArchive(fails=True)
    compute(old, "a", 1, 1, 2, 2)
    PrefixFile(tmp_path / "f", old, archive).save()
    new = manager()
    PrefixFile(tmp_path / "f", new, archive).load()
    assert new.prefixes.num_blocks == 0
    new.check_invariants()
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "layers.3 is damaged" in record.message


def test_a_full_disk_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = manager()
    compute(kv, "a", 1, 1)
    PrefixFile(tmp_path / "f", kv, FakeArchive(full=True)).save()
    assert "no space left" in caplog.text


def test_an_empty_cache_leaves_the_file_alone(tmp_path: Path) -> None:
    PrefixFile(tmp_path / "f", manager(), FakeArchive(full=True)).save()
    assert list(tmp_path.iterdir()) == []


def test_the_flag_needs_the_cache() -> None:
    with pytest.raises(ConfigError, match="--prefix-cache-file"):
        CacheConfig(prefix_cache_file="f", enable_prefix_caching=False)


# ---------------------------------------------------------------------------- a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_model_len=128)


def answer(model: Path, file: Path, **settings: Any) -> tuple[list[int], int]:
    """The tokens of one run of an engine, and how many of the prompt's it found in its cache."""
    with LLM(str(model), prefix_cache_file=str(file), **{**SETTINGS, **settings}) as llm:
        (output,) = llm.generate([PROMPT], GREEDY)
        return output.token_ids, llm.stats.total_prefix_cache_hits


def test_a_restarted_engine_finds_its_prefixes_and_says_the_same(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache.safetensors"
    first = answer(model, file)
    assert first[1] == 0
    with caplog.at_level(logging.INFO):
        assert answer(model, file) == (first[0], 64)
    assert "tokens are back" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("change", ["block size", "weights", "garbage", "cut off"])
def test_a_file_that_does_not_fit_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    file = tmp_path / "cache.safetensors"
    answer(model, file)
    settings: dict[str, Any] = {}
    if change == "block size":
        settings["block_size"] = 8
    elif change == "weights":
        model = save_tiny_model(tmp_path / "other", max_model_len=128)
        weights = model / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1  # the least bit of one weight
        weights.write_bytes(data)
    elif change == "garbage":
        file.write_bytes(b"\x00" * 100)
    else:
        file.write_bytes(file.read_bytes()[:-10])
    caplog.clear()
    assert answer(model, file, **settings)[1] == 0
    assert "is of no use here" in caplog.text
