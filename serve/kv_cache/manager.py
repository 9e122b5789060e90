"""Which blocks each request's KV lies in, on the device and in host memory.

Ids and counts only. The scheduler asks here for room; the copies this returns travel in the step's
plan and are carried out by the worker, in plan order, so a block may be handed to a new owner while
the copy out of it is still only planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.block_pool import BlockPool
from serve.kv_cache.block_table import BlockTable, num_blocks_for
from serve.kv_cache.prefix_cache import PrefixCache
from serve.kv_cache.prefix_index import BlockHashes
from serve.kv_cache.prompt_regimes import PromptRegimes


class KVCacheManager:
    """Owns the block pools and tables of both tiers. A request is in one tier at a time.

    `num_blocks` usable device blocks have ids 1 … num_blocks (0 is the null block); the
    `num_host_blocks` host blocks have ids 0 … num_host_blocks - 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        *,
        enable_prefix_caching: bool = False,
        max_pinned_blocks: int = 0,
        prompt_limits: Sequence[tuple[int, bool]] = (),
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._device = BlockPool(num_blocks, first_id=1)
        self._host = BlockPool(num_host_blocks, first_id=0)
        self.prefixes = PrefixCache(self._device, block_size, max_pinned_blocks)
        self.prompt_regimes = PromptRegimes(prompt_limits)
        self._tables: dict[str, BlockTable] = {}
        self._host_blocks: dict[str, list[int]] = {}

    # ------------------------------------------------------------------ counts

    @property
    def num_blocks(self) -> int:
        """Usable device blocks."""
        return self._device.num_blocks

    @property
    def num_blocks_used(self) -> int:
        """Device blocks that live requests hold."""
        return self._device.num_used

    @property
    def num_blocks_free(self) -> int:
        """Device blocks that can be taken."""
        return self._device.num_free

    @property
    def num_host_blocks(self) -> int:
        """Host blocks."""
        return self._host.num_blocks

    @property
    def num_host_blocks_used(self) -> int:
        """Host blocks that swapped-out requests hold."""
        return self._host.num_used

    def num_blocks_needed(self, num_tokens: int, matched: Sequence[int] = ()) -> int:
        """Free blocks that a new table takes; a matched one that nobody holds is among them."""
        unmatched = self.num_blocks_for(num_tokens) - len(matched)
        return unmatched + self._device.num_free_among(matched)

    def num_blocks_only_held_by(self, request_ids: Iterable[str]) -> int:
        """Device blocks that would be free if these requests were gone."""
        held = Counter(i for name in request_ids for i in self._tables[name].block_ids)
        return sum(1 for i, holds in held.items() if self._device.is_only_held(i, holds))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return num_blocks_for(num_tokens, self.block_size)

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of a request's device block table."""
        return list(self._tables[request_id].block_ids)

    # ------------------------------------------------------------------ room on the device

    def grow(
        self,
        request_id: str,
        num_tokens: int,
        *,
        matched: Sequence[int] = (),
        keep_free: int = 0,
    ) -> list[int] | None:
        """Make the table cover `num_tokens`; a request without one gets one.

        `matched` are the first blocks of a new table, as `match_prefix` found them. Returns the
        added block ids, without those. None, and nothing changed, when that would leave fewer than
        `keep_free` blocks free.
        """
        table = self._tables.get(request_id)
        if table is None:
            return self._start_table(request_id, num_tokens, matched, keep_free)
        if num_tokens <= table.num_slots:
            return []
        assert not matched, f"{request_id} already has blocks"
        added = self._take(table.num_missing(num_tokens), keep_free)
        if added is not None:
            table.extend(added)
        return added

    def free(self, request_id: str) -> None:
        """Give back all of a request's blocks, in both tiers. Unknown ids are fine."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._drop(table)
        self._host.drop(self._host_blocks.pop(request_id, ()))

    # ------------------------------------------------------------------ shared prefixes

    def match_prefix(self, hashes: BlockHashes, max_tokens: int) -> list[int]:
        """Blocks that already hold the beginning of a token sequence, at most `max_tokens` of it.

        Changes nothing; the blocks may be lost to others before they are given to `grow`.
        """
        return self.prefixes.match(hashes, max_tokens) if self.enable_prefix_caching else []

    def commit(self, request_id: str, hashes: BlockHashes, num_tokens: int) -> None:
        """Let others find a request's full blocks among its first `num_tokens`, now computed."""
        self.prefixes.commit(self._tables[request_id], hashes, num_tokens)

    def num_findable(self, request_id: str) -> tuple[int, int]:
        """If this request gave up its blocks: how many could be found again by their content, and
        how many of these for sure."""
        return self.prefixes.num_findable(self._tables[request_id].block_ids)

    # ------------------------------------------------------------------ host tier

    def can_swap_out(self, num_tokens: int) -> bool:
        """Whether the host tier has room for the KV of `num_tokens` tokens."""
        return self.num_blocks_for(num_tokens) <= self._host.num_free

    def swap_out(self, request_id: str, num_tokens: int) -> list[BlockCopy] | None:
        """Move the KV of a request's first `num_tokens` tokens to the host; drop its device blocks.

        Returns the device → host copies. None, and nothing changed, when the host tier is full.
        Blocks shared with other requests are copied too; the others keep theirs.
        """
        host_ids = self._host.take(self.num_blocks_for(num_tokens))
        if host_ids is None:
            return None
        table = self._tables.pop(request_id)
        copies = [BlockCopy(src, dst) for src, dst in zip(table.block_ids, host_ids, strict=False)]
        assert len(copies) == len(host_ids), f"{request_id} has no KV for {num_tokens} tokens"
        self._drop(table)
        self._host_blocks[request_id] = host_ids
        return copies

    def swap_in(
        self, request_id: str, num_tokens: int, *, keep_free: int = 0
    ) -> list[BlockCopy] | None:
        """Bring a swapped-out request back, with a table that covers `num_tokens`.

        Returns the host → device copies; the host blocks are free at once. None, and nothing
        changed, when that would leave fewer than `keep_free` device blocks free.
        """
        host_ids = self._host_blocks[request_id]
        needed = max(len(host_ids), self.num_blocks_for(num_tokens))
        block_ids = self._take(needed, keep_free)
        if block_ids is None:
            return None
        table = BlockTable(self.block_size)
        table.extend(block_ids)
        self._tables[request_id] = table
        self._host.drop(self._host_blocks.pop(request_id))
        return [BlockCopy(src, dst) for src, dst in zip(host_ids, block_ids, strict=False)]

    # ------------------------------------------------------------------ inside

    def _start_table(
        self, request_id: str, num_tokens: int, matched: Sequence[int], keep_free: int
    ) -> list[int] | None:
        table = BlockTable(self.block_size)
        if self.num_blocks_needed(num_tokens, matched) + keep_free > self._device.num_free:
            return None
        self._device.share(matched)
        added = self._take(self.num_blocks_for(num_tokens) - len(matched), 0)
        assert added is not None
        table.extend([*matched, *added])
        table.num_indexed = len(matched)
        self._tables[request_id] = table
        return added

    def _take(self, count: int, keep_free: int) -> list[int] | None:
        if count + keep_free > self._device.num_free:
            return None
        block_ids = self._device.take(count)
        if block_ids:
            self.prefixes.lose(block_ids)
        return block_ids

    def _drop(self, table: BlockTable) -> None:
        # Last blocks first: a prompt's beginning is what others are most likely to share.
        self._device.drop(table.block_ids[::-1], keep=self.prefixes)

    def check_holders(self, *, device: set[str], host: set[str]) -> None:
        """Exactly these requests have blocks in each tier."""
        assert self._tables.keys() == device, self._tables.keys() ^ device
        assert self._host_blocks.keys() == host, self._host_blocks.keys() ^ host

    def check_invariants(self) -> None:
        """Every hold of a pool is one table entry, and nobody is in both tiers."""
        self._device.check_invariants()
        self._host.check_invariants()
        self.prefixes.check_invariants()
        held = Counter(i for table in self._tables.values() for i in table.block_ids)
        assert 0 not in held, "the null block is in a table"
        for block_id in range(1, self.num_blocks + 1):
            assert self._device.ref_count(block_id) == held[block_id], (
                f"block {block_id}: {self._device.ref_count(block_id)} holds, "
                f"{held[block_id]} table entries"
            )
        for request_id, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), (
                f"{request_id} repeats a block"
            )
            assert table.num_indexed <= len(table.block_ids), request_id
            assert table.num_slots == len(table.block_ids) * self.block_size, request_id
        held_on_host = [i for ids in self._host_blocks.values() for i in ids]
        assert len(set(held_on_host)) == len(held_on_host), "a host block has two owners"
        assert len(held_on_host) == self._host.num_used, "a host block is held by nobody"
        both = self._tables.keys() & self._host_blocks.keys()
        assert not both, f"in both tiers: {both}"
