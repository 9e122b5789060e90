"""Chunks assembled from text must be the JSON that a library would have written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve.api.answering.choices import Choice
from serve.api.answering.chunks import ChunkWriter, Envelope, in_intervals, text_json
from serve.api.answering.generation import Tally
from serve.api.answering.parts import Piece, parts_of
from serve.api.protocol.common import StreamOptions
from serve.messages import FinishReason
from tests.api.answering.test_generation import spelled

ENVELOPE = Envelope('id\u2028"1', "text_completion", 5, "modèle", "fp_1")
texts = st.text(st.characters(exclude_categories=("Cs",)))


def writer(**options: bool) -> ChunkWriter:
    tally = Tally(generated=[2, 3], cached=[1, 1], num_prompt_tokens=7, n=2)
    return ChunkWriter(ENVELOPE, StreamOptions(**options) if options else None, tally)


def parsed(event: bytes) -> Any:
    assert event.isascii()
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@given(texts, st.integers(0, 9))
def test_any_text_survives(text: str, index: int) -> None:
    chunk = parsed(writer().chunk(index, f'"text":{text_json(text)}'))

    assert chunk == {
        **ENVELOPE.fields(),
        "choices": [{"index": index, "text": text, "finish_reason": None}],
    }


@given(st.one_of(st.none(), st.integers(), texts))
def test_the_last_chunk_says_why(stop_reason: str | int | None) -> None:
    (choice,) = parsed(writer().last_chunk(0, '"delta":{}', "stop", stop_reason))["choices"]

    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop_reason


def test_usage_is_absent_null_or_told_as_asked() -> None:
    payload = '"text":""'
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "usage" not in parsed(writer().chunk(0, payload))
    assert writer().figures_chunk() == b""
    asked = writer(include_usage=True)
    assert parsed(asked.chunk(0, payload))["usage"] is None
    assert parsed(asked.figures_chunk()) == {**ENVELOPE.fields(), "choices": [], "usage": usage}
    always = writer(include_usage=True, continuous_usage_stats=True)
    assert parsed(always.chunk(0, payload))["usage"] == usage
    assert "usage" not in parsed(writer(continuous_usage_stats=True).chunk(0, payload))


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
