"""Pinned prefixes: claims, their cap, and blocks that are never handed out."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve.kv_cache.manager import KVCacheManager
from serve.kv_cache.pins import Pin, PrefixPins
from serve.kv_cache.prefix_index import BlockHashes

BLOCK = 2


def hashes(*token_ids: int) -> BlockHashes:
    made = BlockHashes(BLOCK)
    made.extend(token_ids)
    return made


def pin(name: str, *token_ids: int, expires_at: float = math.inf) -> Pin:
    return Pin(name, tuple(hashes(*token_ids).values), expires_at)


def manager(num_blocks: int = 6, max_pinned: int = 4) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, BLOCK, 0, enable_prefix_caching=True, max_pinned_blocks=max_pinned
    )


def compute(kv: KVCacheManager, name: str, *token_ids: int) -> None:
    """Have a request compute these tokens, and go."""
    assert kv.grow(name, len(token_ids)) is not None
    kv.commit(name, hashes(*token_ids), len(token_ids))
    kv.free(name)


def find(kv: KVCacheManager, *token_ids: int) -> int:
    return len(kv.match_prefix(hashes(*token_ids), len(token_ids)))


def test_a_pinned_block_outlives_everything_that_comes() -> None:
    kv = manager()
    compute(kv, "a", 1, 2, 3, 4)
    assert kv.prefixes.pin(pin("p", 1, 2, 3, 4))
    assert (kv.num_blocks_free, kv.num_blocks_used) == (4, 0)
    for number in range(20):
        compute(kv, f"r{number}", *[100 + number] * 8)
        kv.check_invariants()
    assert find(kv, 1, 2, 3, 4) == 2
    assert kv.grow("large", 5 * BLOCK) is None  # they are not there for others
    assert kv.prefixes.unpin("p")
    assert kv.grow("large", 5 * BLOCK) is not None
    kv.check_invariants()


def test_a_claim_may_come_before_its_content_and_while_others_hold_it() -> None:
    kv = manager()
    assert kv.prefixes.pin(pin("p", 1, 2, 3, 4))
    assert kv.prefixes.num_pinned == 0
    kv.grow("a", 4)
    kv.commit("a", hashes(1, 2, 3, 4), 4)
    assert (kv.prefixes.num_pinned, kv.num_blocks_used) == (2, 2)
    assert kv.num_blocks_only_held_by(["a"]) == 0  # its end frees nothing
    kv.free("a")
    assert (kv.num_blocks_used, kv.num_blocks_free) == (0, 4)
    kv.check_invariants()


def test_the_cap_counts_shared_beginnings_once_and_refuses_whole_pins() -> None:
    kv = manager(max_pinned=3)
    assert kv.prefixes.pin(pin("p", 1, 2, 3, 4))
    assert kv.prefixes.pin(pin("q", 1, 2, 5, 6))
    assert not kv.prefixes.pin(pin("r", 7, 8))
    assert kv.prefixes.pins.num_blocks == 3
    assert kv.prefixes.unpin("p")  # what q needs of it stays
    assert kv.prefixes.pins.num_blocks == 2
    assert kv.prefixes.pin(pin("r", 7, 8))
    assert not kv.prefixes.unpin("p")
    kv.check_invariants()


def test_pinning_again_prolongs_and_never_shortens() -> None:
    pins = PrefixPins(9)
    for expires_at, wanted in ((10.0, 10.0), (5.0, 10.0), (20.0, 20.0)):
        pins.put(pin("p", 1, 2, expires_at=expires_at))
        assert pins.by_id["p"].expires_at == wanted
    assert pins.expired(20.0) == []
    assert pins.expired(20.1) == ["p"]


def test_forgetting_prefixes_spares_what_is_pinned() -> None:
    kv = manager()
    compute(kv, "a", 1, 2)
    compute(kv, "b", 3, 4)
    kv.prefixes.pin(pin("p", 3, 4))
    assert kv.prefixes.forget() == 1
    assert (find(kv, 1, 2), find(kv, 3, 4)) == (0, 1)
    kv.check_invariants()


class PinMachine(RuleBasedStateMachine):
    """Few contents, few blocks: everything collides with everything."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = manager(num_blocks=7, max_pinned=4)
        self.tokens: dict[str, list[int]] = {}
        self.pinned: dict[str, list[int]] = {}  # whose content was there at some time
        self.number = 0

    sequences = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=5 * BLOCK)

    @rule(tokens=sequences)
    def start(self, tokens: list[int]) -> None:
        self.number += 1
        name, known = f"r{self.number}", hashes(*tokens)
        matched = self.kv.match_prefix(known, len(tokens))
        if self.kv.grow(name, len(tokens), matched=matched) is not None:
            self.kv.commit(name, known, len(tokens))
            self.tokens[name] = tokens

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tokens:
            name = data.draw(st.sampled_from(sorted(self.tokens)))
            self.kv.free(name)
            del self.tokens[name]

    @rule(tokens=sequences)
    def pin(self, tokens: list[int]) -> None:
        name = "".join(map(str, tokens))
        if self.kv.prefixes.pin(pin(name, *tokens)):
            self.pinned[name] = tokens

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            name = data.draw(st.sampled_from(sorted(self.pinned)))
            assert self.kv.prefixes.unpin(name)
            del self.pinned[name]

    @rule()
    def forget(self) -> None:
        self.kv.prefixes.forget()

    @invariant()
    def holds(self) -> None:
        self.kv.check_invariants()
        assert self.kv.num_blocks_free + self.kv.num_blocks_used <= self.kv.num_blocks
        found = {name: find(self.kv, *tokens) for name, tokens in self.pinned.items()}
        for name, before in getattr(self, "found", {}).items():
            if name in found:
                assert found[name] >= before, f"{name} lost a block"
        self.found = found


TestPinMachine = PinMachine.TestCase


@pytest.mark.parametrize("now", [0.0, 1e9])
def test_nothing_expires_that_has_no_end(now: float) -> None:
    kv = manager()
    kv.prefixes.pin(pin("p", 1, 2))
    kv.prefixes.unpin_expired(now)
    assert kv.prefixes.pins.num_blocks == 1
