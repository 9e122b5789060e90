"""Hash chains tell apart what must be told apart, and the index forgets what is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.kv_cache.prefix_index import BlockHashes, PrefixIndex

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def hashes(tokens: list[int], block_size: int = 4, **extras: str) -> list[bytes]:
    chain = BlockHashes(block_size, **extras)
    chain.extend(tokens)
    return chain.values


@given(TOKENS, TOKENS)
def test_two_chains_agree_exactly_as_far_as_their_tokens_do(a: list[int], b: list[int]) -> None:
    same_blocks = 0
    while (same_blocks + 1) * 4 <= min(len(a), len(b)) and (
        a[: (same_blocks + 1) * 4] == b[: (same_blocks + 1) * 4]
    ):
        same_blocks += 1
    for position, (x, y) in enumerate(zip(hashes(a), hashes(b), strict=False)):
        assert (x == y) == (position < same_blocks)


@given(TOKENS, TOKENS)
def test_a_chain_grows_to_what_it_would_have_been_at_once(a: list[int], b: list[int]) -> None:
    chain = BlockHashes(4)
    chain.extend(a)
    chain.extend(a + b)
    chain.extend(a + b)
    assert chain.values == hashes(a + b)


def test_sch_21_extras_are_told_apart_by_name_and_value() -> None:
    tokens = [1, 2, 3, 4]
    variants = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"adapter": "a"},
        {"adapter": "a", "cache_salt": "b"},
        {"adapter": "b", "cache_salt": "a"},
        {"adapter": "acache_salt"},
        {"adapte": "ra"},
        {"cache_salt": ""},
    ]
    assert len({hashes(tokens, **extras)[0] for extras in variants}) == len(variants)


def test_sch_21_equal_bytes_at_another_place_are_another_block() -> None:
    first, second = hashes([1, 2, 3, 4] * 2)
    assert first != second


def test_matching_stops_at_the_first_block_that_is_not_there() -> None:
    index = PrefixIndex()
    chain = hashes(list(range(16)))
    for position in (0, 1, 3):
        index.put(chain[position], 10 + position)
    assert index.match(chain) == [10, 11]


def test_the_first_of_two_equal_blocks_stays() -> None:
    index = PrefixIndex()
    (value,) = hashes([1, 2, 3, 4])
    index.put(value, 5)
    index.put(value, 6)
    assert index.match([value]) == [5]
    index.forget([6])
    assert index.match([value]) == [5]
    index.check_invariants()


def test_sch_21_a_forgotten_block_is_not_found_under_its_old_tokens() -> None:
    index = PrefixIndex()
    old, new = hashes([1, 2, 3, 4])[0], hashes([4, 3, 2, 1])[0]
    index.put(old, 5)
    index.forget([5, 6])
    index.put(new, 5)
    assert (index.match([old]), index.match([new])) == ([], [5])
    index.check_invariants()


def test_only_what_is_named_is_kept() -> None:
    index = PrefixIndex()
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert index.put(first, 5)
    assert index.put(second, 6)
    assert not index.put(second, 7)
    index.keep_only({6, 7})
    assert index.items() == [(second, 6)]
    assert 5 not in index
    index.check_invariants()
