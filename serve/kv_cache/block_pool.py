"""Block ids of one memory tier: who holds a block is counted here, what is in it is not known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class BlockPool:
    """Ids `first_id … first_id + num_blocks - 1`, each free or held by one or more tables.

    Free blocks whose content is of no use are handed out first; the others after them, the longest
    free first, so that what they hold stays readable for as long as possible. A pool whose
    `first_id` is 1 never hands out the null block. A pinned block is not handed out, held or not:
    while nobody holds it, it is neither free nor used.
    """

    def __init__(self, num_blocks: int, *, first_id: int = 1) -> None:
        self.num_blocks = num_blocks
        self._first_id = first_id
        self._ref_counts = [0] * num_blocks
        self._pinned: set[int] = set()
        self._num_idle_pinned = 0  # pinned, and held by nobody
        self._free = OrderedDict.fromkeys(range(first_id, first_id + num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def free(self) -> list[int]:
        """The blocks that can be taken, in the order in which they will be."""
        return list(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return self.num_blocks - len(self._free) - self._num_idle_pinned

    @property
    def pinned(self) -> frozenset[int]:
        """The pinned blocks."""
        return frozenset(self._pinned)

    @property
    def num_pinned(self) -> int:
        """How many blocks are pinned."""
        return len(self._pinned)

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
                self._leave_rest(block_id)
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
                self._rest(block_id, keep)

    def pin(self, block_id: int) -> None:
        """From now on the block is not handed out."""
        if block_id in self._pinned:
            return
        if self.ref_count(block_id) == 0:
            self._leave_rest(block_id)
            self._num_idle_pinned += 1
        self._pinned.add(block_id)

    def unpin(self, block_id: int) -> None:
        """A pinned block is like any other again; free, if nobody holds it, and freed last."""
        self._pinned.remove(block_id)
        if self.ref_count(block_id) == 0:
            self._num_idle_pinned -= 1
            self._free[block_id] = None

    def _rest(self, block_id: int, keep: Container[int]) -> None:
        """Nobody holds the block any more."""
        if block_id in self._pinned:
            self._num_idle_pinned += 1
            return
        self._free[block_id] = None
        if block_id not in keep:
            self._free.move_to_end(block_id, last=False)

    def _leave_rest(self, block_id: int) -> None:
        """The block, which nobody holds, is about to be held or pinned."""
        if block_id in self._pinned:
            self._num_idle_pinned -= 1
        else:
            del self._free[block_id]

    def ref_count(self, block_id: int) -> int:
        """How many tables hold a block."""
        return self._ref_counts[block_id - self._first_id]

    def is_only_held(self, block_id: int, num_holds: int) -> bool:
        """Whether it would be free if so many holds were dropped."""
        return self.ref_count(block_id) == num_holds and block_id not in self._pinned

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks can be taken by others."""
        return sum(1 for block_id in block_ids if block_id in self._free)

    def check_invariants(self) -> None:
        """A block is free exactly when nobody holds it and it is not pinned."""
        for index, count in enumerate(self._ref_counts):
            block_id = index + self._first_id
            assert count >= 0, f"block {block_id} has {count} holders"
            is_free = count == 0 and block_id not in self._pinned
            assert is_free == (block_id in self._free), (
                f"block {block_id} has {count} holders, free: {block_id in self._free}, "
                f"pinned: {block_id in self._pinned}"
            )
        idle = sum(self.ref_count(block_id) == 0 for block_id in self._pinned)
        assert idle == self._num_idle_pinned, (idle, self._num_idle_pinned)
        assert len(self._free) <= self.num_blocks, "a foreign block is in the free list"
