"""Log-probabilities of whole answers, written as JSON while they come.

A request may ask for a million of them. As JSON each takes a hundred bytes and not a thousand, and
whoever else is served waits for a slice of them at most, and not for all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from serve.api.answering.logprobs import (
    ChatLogprobsWriter,
    CompletionLogprobsWriter,
    TokenNames,
    prompt_candidates,
)
from serve.engine.outputs import RequestOutput
from serve.messages import TokenLogprobs

SLICE = 512
"""Candidates that are written before others have their turn: about 2 ms."""


class Scores(Protocol):
    """One choice's log-probabilities."""

    async def add(self, output: RequestOutput) -> None:
        """Write what an output brings."""

    def pieces(self) -> list[str]:
        """`logprobs` as JSON, in pieces."""

    def prompt_pieces(self) -> list[str]:
        """`prompt_logprobs` as JSON, in pieces."""


class ChatScores:
    """The log-probabilities of one chat answer. Without `writer` or `names` those of its tokens or
    of the prompt are not wanted."""

    def __init__(self, writer: ChatLogprobsWriter | None, names: TokenNames | None) -> None:
        self._writer = writer
        self._content = _JsonList()
        self._prompt = PromptScores(names)

    async def add(self, output: RequestOutput) -> None:
        await self._prompt.add(output)
        if self._writer is None:
            return
        async for part, is_last in _slices(output.logprobs):
            hides_last = is_last and output.hides_last
            self._content.extend(self._writer.generated(part, hides_last=hides_last)["content"])

    def pieces(self) -> list[str]:
        if self._writer is None:
            return ["null"]
        return ['{"content":', *self._content.pieces(), ',"refusal":null}']

    def prompt_pieces(self) -> list[str]:
        return self._prompt.pieces()


class CompletionScores:
    """The log-probabilities of one completion; those of an echoed prompt come first."""

    def __init__(
        self,
        writer: CompletionLogprobsWriter | None,
        names: TokenNames | None,
        echoed: Sequence[int] | None,
    ) -> None:
        self._writer = writer
        self._prompt = PromptScores(names)
        self._lists: dict[str, _JsonList] = {}
        self._echoes = echoed is not None
        if writer is not None:
            self._extend(writer.prompt(echoed[:1], []) if echoed is not None else writer.nothing())

    async def add(self, output: RequestOutput) -> None:
        await self._prompt.add(output)
        if self._writer is None:
            return
        for entries in (output.prompt_logprobs if self._echoes else None, output.logprobs):
            async for part, _ in _slices(entries):
                self._extend(self._writer.generated(part))

    def pieces(self) -> list[str]:
        if self._writer is None:
            return ["null"]
        lists = [(f',"{key}":', *items.pieces()) for key, items in self._lists.items()]
        fields = [piece for each in lists for piece in each]
        return ["{", fields[0][1:], *fields[1:], "}"]

    def prompt_pieces(self) -> list[str]:
        return self._prompt.pieces()

    def _extend(self, columns: dict[str, list[Any]]) -> None:
        for key, items in columns.items():
            self._lists.setdefault(key, _JsonList()).extend(items)


class PromptScores:
    """vLLM's `prompt_logprobs`: the candidates at each position; the first has none."""

    def __init__(self, names: TokenNames | None) -> None:
        self._names = names
        self._list = _JsonList()
        self._list.extend([None])

    async def add(self, output: RequestOutput) -> None:
        """Write what an output brings."""
        if self._names is None:
            return
        async for part, _ in _slices(output.prompt_logprobs):
            self._list.extend([prompt_candidates(entry, self._names) for entry in part])

    def pieces(self) -> list[str]:
        """The list as JSON."""
        return self._list.pieces()


class _JsonList:
    """A list as JSON text that grows."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def extend(self, items: list[Any]) -> None:
        if items:
            self._parts.append(json.dumps(items, separators=(",", ":"))[1:-1])

    def pieces(self) -> list[str]:
        between = [piece for part in self._parts for piece in (",", part)]
        return ["[", *between[1:], "]"]


async def _slices(
    entries: Sequence[TokenLogprobs] | None,
) -> AsyncIterator[tuple[Sequence[TokenLogprobs], bool]]:
    """The entries in slices, and whether it is the last one; between two, others have a turn."""
    if not entries:
        return
    size = max(1, SLICE // (len(entries[0].top_token_ids) + 1))
    for start in range(0, len(entries), size):
        if start:
            await asyncio.sleep(0)
        yield entries[start : start + size], start + size >= len(entries)
