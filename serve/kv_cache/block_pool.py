"""Block ids of one memory tier: who holds a block is counted here, what is in it is not known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class BlockPool:
    """Ids `first_id … first_id + num_blocks - 1`, each free or held by one or more tables.

    Free blocks whose content is of no use are handed out first; the others after them, the longest
    free first, so that what they hold stays readable for as long as possible. A pool whose
    `first_id` is 1 never hands out the null block.
    """

    def __init__(self, num_blocks: int, *, first_id: int = 1) -> None:
        self.num_blocks = num_blocks
        self._first_id = first_id
        self._ref_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(first_id, first_id + num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, now held once each; None, and nothing changed, when too few are."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id - self._first_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more; one that was free is not free any longer."""
        for block_id in block_ids:
            index = block_id - self._first_id
            if self._ref_counts[index] == 0:
                del self._free[block_id]
            self._ref_counts[index] += 1

    def drop(self, block_ids: Sequence[int], keep: Container[int] = ()) -> None:
        """Let go of one hold on each block; those nobody holds now become free, in this order.

        The content of blocks in `keep` may be of use to somebody later.
        """
        for block_id in block_ids:
            index = block_id - self._first_id
            assert self._ref_counts[index] > 0, f"block {block_id} was dropped but nobody holds it"
            self._ref_counts[index] -= 1
            if self._ref_counts[index] == 0:
                self._free[block_id] = None
                if block_id not in keep:
                    self._free.move_to_end(block_id, last=False)

    def ref_count(self, block_id: int) -> int:
        """How many tables hold a block."""
        return self._ref_counts[block_id - self._first_id]

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(1 for block_id in block_ids if block_id in self._free)

    def check_invariants(self) -> None:
        """A block is free exactly when nobody holds it."""
        for index, count in enumerate(self._ref_counts):
            block_id = index + self._first_id
            assert count >= 0, f"block {block_id} has {count} holders"
            assert (count == 0) == (block_id in self._free), (
                f"block {block_id} has {count} holders, free: {block_id in self._free}"
            )
        assert len(self._free) <= self.num_blocks, "a foreign block is in the free list"
