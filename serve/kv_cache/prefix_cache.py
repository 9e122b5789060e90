"""Device blocks whose contents can be found by their hashes, and the ones among them that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve.kv_cache.block_pool import BlockPool
from serve.kv_cache.block_table import BlockTable
from serve.kv_cache.pins import Pin, PrefixPins
from serve.kv_cache.prefix_index import BlockHashes, PrefixIndex


class PrefixCache:
    """Owns the index and the pins, and pins blocks of the `device` pool; a part of KVCacheManager.

    A block is pinned exactly when its content is in the index and claimed by a pin.
    """

    def __init__(self, device: BlockPool, block_size: int, max_pinned_blocks: int) -> None:
        self.pins = PrefixPins(max_pinned_blocks)  # changed here, read by others
        self._device = device
        self._block_size = block_size
        self._index = PrefixIndex()

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._index

    @property
    def num_blocks(self) -> int:
        """Blocks whose content can be found, held or not."""
        return len(self._index)

    @property
    def num_pinned(self) -> int:
        """Of these, the ones that stay."""
        return self._device.num_pinned

    # ------------------------------------------------------------------ contents

    def match(self, hashes: BlockHashes, max_tokens: int) -> list[int]:
        """Blocks that hold the beginning of a token sequence, at most `max_tokens` of it."""
        if not len(self._index):
            return []
        return self._index.match(hashes.values[: max_tokens // self._block_size])

    def commit(self, table: BlockTable, hashes: BlockHashes, num_tokens: int) -> None:
        """Enter a table's full blocks among its first `num_tokens`, which are computed now."""
        full = num_tokens // self._block_size
        for position in range(table.num_indexed, full):
            value, block_id = hashes.values[position], table.block_ids[position]
            if self._index.put(value, block_id) and value in self.pins:
                self._device.pin(block_id)
        table.num_indexed = max(table.num_indexed, full)

    def lose(self, block_ids: Sequence[int]) -> None:
        """These blocks are about to hold something else."""
        self._index.forget(block_ids)

    def forget(self) -> int:
        """Empty the index but for what is pinned; how many blocks were forgotten."""
        before = len(self._index)
        self._index.keep_only(self._device.pinned)
        return before - len(self._index)

    def num_among(self, hashes: Iterable[bytes]) -> int:
        """How many of these contents are in a block now."""
        return sum(self._index.block_of(value) is not None for value in hashes)

    def num_findable(self, block_ids: Iterable[int]) -> tuple[int, int]:
        """If the one who holds these blocks gave them up: how many could be found again, and how
        many of them for sure, because others hold them or they are pinned."""
        found = [block_id for block_id in block_ids if block_id in self._index]
        return len(found), sum(not self._device.is_only_held(block_id, 1) for block_id in found)

    def most_wanted(self) -> list[tuple[bytes, int]]:
        """(hash, block) of all contents: what is held or pinned first, then what was freed last; a
        sequence's beginning before its end."""
        age = {block_id: i for i, block_id in enumerate(reversed(self._device.free))}
        return sorted(self._index.items(), key=lambda item: age.get(item[1], -1))

    def restore(self, hashes: Sequence[bytes]) -> list[int]:
        """Free blocks for contents with these hashes, in the order of `most_wanted`; whoever calls
        this fills them before anything runs."""
        block_ids = self._device.take(len(hashes))
        assert block_ids is not None, "there are more contents than free blocks"
        self._index.forget(block_ids)
        for value, block_id in zip(hashes, block_ids, strict=True):
            self._index.put(value, block_id)
        self._device.drop(block_ids[::-1], keep=self._index)
        return block_ids

    # ------------------------------------------------------------------ pins

    def pin(self, pin: Pin) -> bool:
        """Keep a prefix's blocks, those that are there and those still to be computed.

        False, and nothing changed, when more than `pins.max_blocks` would be claimed.
        """
        if self.pins.num_blocks + self.pins.num_new(pin.hashes) > self.pins.max_blocks:
            return False
        self.pins.put(pin)
        for value in pin.hashes:
            block_id = self._index.block_of(value)
            if block_id is not None:
                self._device.pin(block_id)
        return True

    def unpin(self, pin_id: str) -> bool:
        """Let go of a prefix; its blocks stay in the cache like others. False: it is unknown."""
        unclaimed = self.pins.remove(pin_id)
        for value in unclaimed or ():
            block_id = self._index.block_of(value)
            if block_id is not None:
                self._device.unpin(block_id)
        return unclaimed is not None

    def unpin_expired(self, now: float) -> None:
        """Let go of the prefixes whose time is up."""
        for pin_id in self.pins.expired(now):
            self.unpin(pin_id)

    def check_invariants(self) -> None:
        """See the class."""
        self._index.check_invariants()
        self.pins.check_invariants()
        claimed = {block_id for value, block_id in self._index.items() if value in self.pins}
        assert self._device.pinned == claimed, self._device.pinned ^ claimed
