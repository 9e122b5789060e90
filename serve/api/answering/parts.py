"""What an answer consists of. The writers of every API are given parts, and never raw output.

A part is text; where the server tells them apart, also reasoning (`--reasoning-parser`) and what a
tool call is made of (`--tool-call-parser`).
"""

from __future__ import annotations

from collections.abc import Sequence

from serve.answers.events import CallArguments, CallBegun, CallEnded, Content, Reasoning
from serve.answers.reader import AnswerReader
from serve.engine.outputs import RequestOutput

Text = str
"""Words of the answer; those that follow each other are one text. A plain string, because there is
one for every token: any class around it takes 0.3 to 0.6 µs to make."""
Part = Text | Reasoning | CallBegun | CallArguments | CallEnded
Piece = tuple[int, Sequence[Part], RequestOutput]
"""A choice's index, what it gained, and the output that this came with: its tokens, their
log-probabilities, and the end."""


def parts_of(output: RequestOutput) -> Sequence[Part]:
    """What an output adds to an answer; nothing while its text is held back."""
    return (output.text,) if output.text else ()


def read_parts(reader: AnswerReader, output: RequestOutput) -> Sequence[Part]:
    """The same, with reasoning and calls told apart."""
    said = reader.push(output.text) if output.text else []
    if output.finish_reason is not None:
        said += reader.finish()
    return [event.text if isinstance(event, Content) else event for event in said]


def text_of(parts: Sequence[Part]) -> str:
    """The words among the parts."""
    return "".join([part for part in parts if type(part) is str])


def reasoning_of(parts: Sequence[Part]) -> str:
    """The reasoning among the parts."""
    return "".join([part.text for part in parts if isinstance(part, Reasoning)])


def whole_parts(parts: Sequence[Part]) -> list[Text]:
    """The parts of a whole answer: one text, though it may be empty."""
    return [text_of(parts)]
