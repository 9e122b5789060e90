"""What a reader says of an answer's text, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole. One that a limit cut short never ends."""

    index: int


AnswerEvent: TypeAlias = Reasoning | Content | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Call:
    """A call put together; `whole` unless a limit cut it short."""

    name: str
    arguments: str
    whole: bool


def calls_among(said: Iterable[object]) -> tuple[Call, ...]:
    """The calls in what was said, each put together of its pieces."""
    names: list[str] = []
    pieces: list[list[str]] = []
    ended: set[int] = set()
    for event in said:
        match event:
            case CallBegun(_, name):
                names.append(name)
                pieces.append([])
            case CallArguments(index, text):
                pieces[index].append(text)
            case CallEnded(index):
                ended.add(index)
    each = enumerate(zip(names, pieces, strict=True))
    return tuple(Call(name, "".join(texts), index in ended) for index, (name, texts) in each)
