"""The cache manager: room on the device, the host tier, and nothing lost between them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.manager import KVCacheManager

BLOCK_SIZE = 4


class ManagerMachine(RuleBasedStateMachine):
    """Random requests grow, swap and end; contents are followed block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(9, BLOCK_SIZE, 5)
        self.on_device: dict[str, int] = {}  # request → tokens covered
        self.on_host: dict[str, int] = {}  # request → tokens kept
        self.device: dict[int, tuple[str, int]] = {}  # block → (owner, index in its table)
        self.host: dict[int, tuple[str, int]] = {}

    @rule(name=st.sampled_from("abcd"), more=st.integers(1, 9), keep_free=st.integers(0, 3))
    def grow(self, name: str, more: int, keep_free: int) -> None:
        if name in self.on_host:
            return
        num_tokens = self.on_device.get(name, 0) + more
        before, free = self._blocks(name), self.kv.num_blocks_free
        added = self.kv.grow(name, num_tokens, keep_free=keep_free)
        needed = self.kv.num_blocks_for(num_tokens) - len(before)
        if added is None:
            assert needed + keep_free > free
            assert self._blocks(name) == before
            return
        assert len(added) == needed
        assert self.kv.block_ids(name) == before + added
        self.on_device[name] = num_tokens
        self._write(name)

    @rule(name=st.sampled_from("abcd"))
    def free(self, name: str) -> None:
        self.kv.free(name)
        self.on_device.pop(name, None)
        self.on_host.pop(name, None)

    @precondition(lambda self: self.on_device)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.on_device)))
        num_tokens = data.draw(st.integers(1, self.on_device[name]))
        fits = self.kv.can_swap_out(num_tokens)
        copies = self.kv.swap_out(name, num_tokens)
        assert (copies is not None) == fits
        if copies is not None:
            for copy in copies:
                self.host[copy.dst] = self.device[copy.src]
            del self.on_device[name]
            self.on_host[name] = num_tokens

    @precondition(lambda self: self.on_host)
    @rule(data=st.data(), more=st.integers(0, 6), keep_free=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, more: int, keep_free: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.on_host)))
        num_tokens = self.on_host[name] + more
        free = self.kv.num_blocks_free
        copies = self.kv.swap_in(name, num_tokens, keep_free=keep_free)
        if copies is None:
            assert self.kv.num_blocks_for(num_tokens) + keep_free > free
            return
        for copy in copies:
            self.device[copy.dst] = self.host[copy.src]
        kept = self.kv.num_blocks_for(self.on_host.pop(name))
        self.on_device[name] = num_tokens
        blocks = self.kv.block_ids(name)
        assert [self.device[i] for i in blocks[:kept]] == [(name, i) for i in range(kept)]
        self._write(name)

    def _blocks(self, name: str) -> list[int]:
        return self.kv.block_ids(name) if name in self.on_device else []

    def _write(self, name: str) -> None:
        for index, block_id in enumerate(self.kv.block_ids(name)):
            self.device[block_id] = (name, index)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.kv.check_invariants()
        self.kv.check_holders(device=set(self.on_device), host=set(self.on_host))
        for name in self.on_device:
            for index, block_id in enumerate(self.kv.block_ids(name)):
                assert self.device[block_id] == (name, index), "somebody else wrote into it"

    def teardown(self) -> None:
        for name in "abcd":
            self.kv.free(name)
        assert (self.kv.num_blocks_used, self.kv.num_host_blocks_used) == (0, 0)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_growing_within_the_last_block_takes_nothing() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, 0)
    assert kv.grow("a", 5) == [1, 2]
    assert kv.grow("a", 8) == []


def test_no_room_changes_nothing() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, 0)
    kv.grow("a", 9)
    assert kv.grow("b", 5) is None
    assert kv.grow("b", 4, keep_free=1) is None
    assert kv.num_blocks_free == 1
    kv.check_holders(device={"a"}, host=set())


def test_swapping_out_copies_only_blocks_with_content() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, 4)
    kv.grow("a", 16)
    assert kv.swap_out("a", 5) == [BlockCopy(1, 0), BlockCopy(2, 1)]
    assert (kv.num_blocks_used, kv.num_host_blocks_used) == (0, 2)


def test_a_full_host_tier_leaves_the_request_on_the_device() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, 1)
    kv.grow("a", 8)
    assert kv.swap_out("a", 8) is None
    assert kv.block_ids("a") == [1, 2]


def test_freeing_an_unknown_request_is_fine() -> None:
    KVCacheManager(4, BLOCK_SIZE, 1).free("never seen")


@pytest.mark.parametrize("in_host", [False, True])
def test_freeing_gives_everything_back_whichever_tier(in_host: bool) -> None:
    kv = KVCacheManager(4, BLOCK_SIZE, 4)
    kv.grow("a", 16)
    if in_host:
        kv.swap_out("a", 16)
    kv.free("a")
    assert (kv.num_blocks_used, kv.num_host_blocks_used) == (0, 0)
