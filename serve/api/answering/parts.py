"""What an answer consists of. The writers of every API are given parts, and never raw text.

Today a part is text. A kind that joins it (the model's reasoning, a tool call's name or arguments)
is a member of `Part`, told apart in `parts_of`; the type checker then names every writer that does
not know it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serve.engine.outputs import RequestOutput


class Text(NamedTuple):
    """Words of the answer; what follows each other is one text."""

    text: str


Part = Text
Piece = tuple[int, Sequence[Part], RequestOutput]
"""A choice's index, what it gained, and the output that this came with: its tokens, their
log-probabilities, and the end."""


def parts_of(output: RequestOutput) -> Sequence[Part]:
    """What an output adds to an answer; nothing while its text is held back."""
    return (Text(output.text),) if output.text else ()


def text_of(parts: Sequence[Part]) -> str:
    """The words among the parts."""
    if len(parts) == 1:  # as nearly always in a stream
        return parts[0].text
    return "".join([part.text for part in parts])


def whole_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts of a whole answer: one text, though it may be empty."""
    return [Text(text_of(parts))]
