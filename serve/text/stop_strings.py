"""Finding stop strings in a text that comes in pieces, and holding back only what might be one.

Each stop string has a Knuth-Morris-Pratt automaton ("Fast Pattern Matching in Strings", SIAM J.
Comput. 6, 1977): its state is the length of the longest end of the text that begins the string, so
it is at once the match test and the amount to hold back. The cost is linear in the text, and what
is found cannot depend on how the text was cut into pieces. The automaton's table is worked out only
as far as some text has matched, so that a long stop string costs nothing until then, and all texts
that watch for the string share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` may go out now. `stop` is the string that was found; then nothing follows."""

    text: str
    stop: str | None


class StopString:
    """A stop string and what is known of its automaton; any number of texts may watch for it."""

    __slots__ = ("_borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]

    def border(self, length: int) -> int:
        """Of the string's first `length` characters: the length of the longest proper beginning
        that is also their end."""
        while len(self._borders) < length:
            self._extend()
        return self._borders[length - 1]

    def _extend(self) -> None:
        text, borders = self.text, self._borders
        char, border = text[len(borders)], borders[-1]
        while border and char != text[border]:
            border = borders[border - 1]
        borders.append(border + 1 if char == text[border] else border)


class StopStrings:
    """Watches one text for the stop string that ends first (of those, the longest).

    `include` lets the found string out too.
    """

    def __init__(self, stops: Sequence[StopString], *, include: bool) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""

    def scan(self, text: str, *, armed: bool = True) -> Scan:
        """Take the next piece. Unarmed, strings that end within it do not count as found."""
        found: _Automaton | None = None
        end = len(text)
        for automaton in self._automata:
            match_end = automaton.advance(text, armed=armed)
            if match_end is None:
                continue
            longer = found is None or len(automaton.text) > len(found.text)
            if match_end < end or (match_end == end and longer):
                found, end = automaton, match_end
        whole = self._held + text[:end]
        if found is not None:
            self._held = ""
            cut = len(whole) - len(found.text)
            return Scan(whole if self._include else whole[:cut], found.text)
        keep = max((automaton.matched for automaton in self._automata), default=0)
        cut = len(whole) - keep
        self._held = whole[cut:]
        return Scan(whole[:cut], None)

    def flush(self) -> str:
        """What was held back, now that the text is over."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """One stop string in one text; `matched` is how much of it the text so far ends with."""

    __slots__ = ("_stop", "matched", "text")

    def __init__(self, stop: StopString) -> None:
        self.text = stop.text
        self.matched = 0
        self._stop = stop

    def advance(self, text: str, *, armed: bool) -> int | None:
        """The end in `text` of the first match, or None. After a match the state is void."""
        stop, border, matched = self.text, self._stop.border, self.matched
        position, length = 0, len(text)
        while position < length:
            if matched == 0:
                position = text.find(stop[0], position)  # skip at C speed what cannot begin it
                if position < 0:
                    break
            char = text[position]
            while matched and char != stop[matched]:
                matched = border(matched)
            if char == stop[matched]:
                matched += 1
            position += 1
            if matched == len(stop):
                if armed:
                    return position
                matched = border(matched)
        self.matched = matched
        return None
