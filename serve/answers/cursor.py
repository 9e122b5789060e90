"""A place in a text that is still coming: the small readers that larger ones are made of.

Each is a generator that rests, by yielding, while it cannot tell without more text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from serve.answers.json_scanner import SPACE, WORD, WORD_CHARS, JsonScanner

_T = TypeVar("_T")
Step: TypeAlias = Generator[None, None, _T]


class Cursor:
    """A position does not outlive a rest, for the text that was read is let go meanwhile."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # in _text: the next character to look at
        self._mark: int | None = None  # in _text: where we may have to go back to
        self._ended = False

    def _append(self, text: str) -> None:
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        if self._mark is not None:
            self._mark = 0

    def _peek(self) -> Step[str]:
        """The next character, not yet taken; empty at the text's end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _literal(self, literal: str) -> Step[bool]:
        """Takes it if it is next."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                self._at += len(literal)
                return True
            if self._ended or not literal.startswith(ahead):
                return False
            yield

    def _space(self) -> Step[str]:
        space = ""
        while (char := (yield from self._peek())) and char in SPACE:
            space += char
            self._at += 1
        return space

    def _string(self) -> Step[str | None]:
        """A JSON string's value, or None if there is none."""
        if (yield from self._peek()) != '"':
            return None
        value = yield from self._any()
        return None if value is None else str(json.loads(value))

    def _any(self) -> Step[str | None]:
        """A JSON value as it is written."""
        pieces: list[str] = []
        if (yield from self._peek()) in tuple('{["'):
            whole = yield from self._value(pieces.append)
            return "".join(pieces) if whole else None
        while (char := (yield from self._peek())) and char in WORD_CHARS:
            pieces.append(char)
            self._at += 1
        return "".join(pieces) if WORD.fullmatch("".join(pieces)) else None

    def _value(self, take: Callable[[str], object]) -> Step[bool]:
        """Gives `take` an object's, list's or string's text; whether it came to its end."""
        scanner = JsonScanner()
        while True:
            begin, fits = self._at, True
            while fits and not scanner.done and self._at < len(self._text):
                fits = scanner.feed(self._text[self._at])
                self._at += fits
            take(self._text[begin : self._at])
            if scanner.done or not fits or self._ended:
                return scanner.done and fits
            yield
