"""Positions to blocks."""

from __future__ import annotations

import pytest

from serve.kv_cache.block_table import BlockTable, num_blocks_for


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "wanted"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (3, 1, 3)]
)
def test_a_begun_block_counts_whole(num_tokens: int, block_size: int, wanted: int) -> None:
    assert num_blocks_for(num_tokens, block_size) == wanted


def test_a_table_knows_what_it_lacks() -> None:
    table = BlockTable(4)
    assert table.num_missing(9) == 3
    table.extend([7, 2])
    assert (table.num_slots, table.num_missing(9), table.num_missing(8)) == (8, 1, 0)
