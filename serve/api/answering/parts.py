"""What an answer consists of. The writers of every API are given parts, and never raw output.

Today a part is text. A kind that joins it (the model's reasoning, a tool call's name or arguments)
is a class of its own among `Part`, told apart in `parts_of`; the type checker then names every
writer that does not know it yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve.engine.outputs import RequestOutput

Text = str
"""Words of the answer; those that follow each other are one text. A plain string, because there is
one for every token: any class around it takes 0.3 to 0.6 µs to make."""
Part = Text
Piece = tuple[int, Sequence[Part], RequestOutput]
"""A choice's index, what it gained, and the output that this came with: its tokens, their
log-probabilities, and the end."""


def parts_of(output: RequestOutput) -> Sequence[Part]:
    """What an output adds to an answer; nothing while its text is held back."""
    return (output.text,) if output.text else ()


def text_of(parts: Sequence[Part]) -> str:
    """The words among the parts."""
    return "".join(parts)


def whole_parts(parts: Sequence[Part]) -> list[Part]:
    """The parts of a whole answer: one text, though it may be empty."""
    return [text_of(parts)]
