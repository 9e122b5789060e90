"""Where a JSON value ends, and whether it is one, a character at a time (RFC 8259)."""

from __future__ import annotations

import re
from typing import Literal

State = Literal["value", "first", "key", "first_key", "colon", "after", "word", "string"]
SPACE = " \t\n\r"
WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
WORD_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Reads one object, list or string. Numbers and words stand within these only, for their end
    shows by what follows."""

    def __init__(self) -> None:
        self.done = False
        self._state: State = "value"
        self._closers: list[str] = []
        self._word = ""
        self._is_key = False
        self._escape = 0  # of a string's escape: 5 after the backslash, 4 to 1 hex digits to come

    def feed(self, char: str) -> bool:
        """False: no JSON value begins with what was fed."""
        if self._state == "string":
            return self._in_string(char)
        if self._state == "word":
            if char in WORD_CHARS:
                self._word += char
                return True
            if not WORD.fullmatch(self._word):
                return False
            self._state = "after"
        return char in SPACE or self._structure(char)

    def _structure(self, char: str) -> bool:
        state = self._state
        if char in "]}" and self._closers and char == self._closers[-1]:
            fits = state == "after" or state == ("first" if char == "]" else "first_key")
            self._closers.pop()
            self._end_value()
            return fits
        if state == "after":
            self._state = "key" if self._closers[-1] == "}" else "value"
            return char == ","
        if state == "colon":
            self._state = "value"
            return char == ":"
        if char == '"':
            self._is_key = state in ("key", "first_key")
            self._state = "string"
            return True
        return state in ("value", "first") and self._begin_value(char)

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._state = "first_key" if char == "{" else "first"
            return True
        self._state, self._word = "word", char
        return bool(self._closers) and char in WORD_CHARS

    def _end_value(self) -> None:
        self._state = "after"
        self.done = not self._closers

    def _in_string(self, char: str) -> bool:
        if self._escape == 5:
            self._escape = 4 if char == "u" else 0
            return char in '"\\/bfnrtu'
        if self._escape:
            self._escape -= 1
            return char in _HEX
        if char == "\\":
            self._escape = 5
        elif char == '"' and self._is_key:
            self._state, self._is_key = "colon", False
        elif char == '"':
            self._end_value()
        return char >= " "
