"""Outputs joined in intervals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve.api.answering.choices import Choice, in_intervals
from serve.api.answering.parts import Piece, parts_of
from serve.messages import FinishReason
from tests.api.answering.test_generation import spelled


class Listed:
    """Pieces of a list."""

    def __init__(self, items: list[Piece]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[Piece]:
        async def run() -> AsyncIterator[Piece]:
            for item in self._items:
                yield item

        return run()


@given(st.lists(st.text("abc", max_size=20), min_size=1, max_size=3), st.integers(1, 6))
def test_intervals_change_the_grouping_and_nothing_else(texts: list[str], interval: int) -> None:
    streams = [spelled(text) for text in texts]
    items = [
        (index, parts_of(stream[position]), stream[position])
        for position in range(max(map(len, streams)))
        for index, stream in enumerate(streams)
        if position < len(stream)
    ]

    async def regrouped() -> list[Piece]:
        listed: Any = Listed(items)
        return [item async for item in in_intervals(listed, interval)]

    choices = [Choice() for _ in texts]
    sizes: list[list[int]] = [[] for _ in texts]
    for index, parts, each in asyncio.run(regrouped()):
        choices[index].add(parts, each)
        sizes[index].append(len(each.token_ids))
    assert [choice.text for choice in choices] == texts
    assert [choice.finish_reason for choice in choices] == [FinishReason.STOP] * len(texts)
    for mine in sizes:
        assert all(size == interval for size in mine[1:-1])
        assert all(size <= interval for size in mine)
