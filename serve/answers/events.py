"""What a reader says of an answer's text, in the order in which it was written."""

from __future__ import annotations

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
    name: str
    arguments: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a reader said, joined."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def joined(events: list[AnswerEvent]) -> Answer:
    """A whole answer is its stream put together: there is no second way to read one."""
    begun = [event for event in events if isinstance(event, CallBegun)]
    pieces: dict[int, list[str]] = {event.index: [] for event in begun}
    for event in events:
        if isinstance(event, CallArguments):
            pieces[event.index].append(event.text)
    ended = {event.index for event in events if isinstance(event, CallEnded)}
    return Answer(
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        tuple(Call(c.name, "".join(pieces[c.index]), c.index in ended) for c in begun),
    )
