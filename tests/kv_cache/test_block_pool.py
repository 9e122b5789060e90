"""Block pools count who holds what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serve.kv_cache.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool against the obvious model: a list of holds, and a list of free blocks in order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, first_id=1)
        self.holds: list[int] = []
        self.free = list(range(1, 8))

    @rule(count=st.integers(0, 8))
    def take(self, count: int) -> None:
        taken = self.pool.take(count)
        if count > len(self.free):
            assert taken is None
            return
        assert taken == self.free[:count]
        self.free = self.free[count:]
        self.holds += taken

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.holds))
        self.pool.share([block_id])
        self.holds.append(block_id)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def share_a_free_block(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.free))
        self.pool.share([block_id])
        self.free.remove(block_id)
        self.holds.append(block_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from(self.holds))
        self.holds.remove(block_id)
        self.pool.drop([block_id], keep=[block_id] if keep else [])
        if block_id not in self.holds:
            self.free.insert(len(self.free) if keep else 0, block_id)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_used == len(set(self.holds))
        for block_id in range(1, 8):
            assert self.pool.ref_count(block_id) == self.holds.count(block_id)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_of_blocks_worth_keeping_the_longest_free_is_handed_out_first() -> None:
    pool = BlockPool(3)
    assert pool.take(3) == [1, 2, 3]
    pool.drop([2], keep={1, 2, 3})
    pool.drop([1, 3], keep={1, 2, 3})
    assert pool.take(2) == [2, 1]


def test_blocks_not_worth_keeping_are_handed_out_before_those_that_are() -> None:
    pool = BlockPool(3)
    pool.take(3)
    pool.drop([1, 2, 3], keep={1, 2})
    assert pool.take(3) == [3, 1, 2]


def test_a_pool_that_starts_at_one_never_hands_out_the_null_block() -> None:
    assert 0 not in (BlockPool(5, first_id=1).take(5) or [])


def test_dropping_a_block_nobody_holds_is_a_bug() -> None:
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 2 was dropped"):
        pool.drop([2])


def test_a_pool_without_blocks_is_fine() -> None:
    pool = BlockPool(0)
    assert pool.take(0) == []
    assert pool.take(1) is None
