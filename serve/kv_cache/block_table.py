"""One request's ordered blocks: where the KV of each of its positions lies."""

from __future__ import annotations


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Position p lies in block `block_ids[p // block_size]`. Changed only by KVCacheManager."""

    __slots__ = ("block_ids", "block_size", "num_indexed", "num_slots")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        self.num_slots = 0  # positions covered
        self.num_indexed = 0  # blocks offered to the prefix index so far

    def extend(self, block_ids: list[int]) -> None:
        """Cover more positions, with these blocks."""
        self.block_ids.extend(block_ids)
        self.num_slots = len(self.block_ids) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to add before the table covers `num_tokens`."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - len(self.block_ids))
