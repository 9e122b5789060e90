"""Finding stop strings in a text that comes in pieces, and holding back only what might be one.

Each stop string has a Knuth-Morris-Pratt automaton ("Fast Pattern Matching in Strings", SIAM J.
Comput. 6, 1977): its state is the length of the longest end of the text that begins the string, so
it is at once the match test and the amount to hold back. The cost is linear in the text, and what
is found cannot depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` may go out now. `stop` is the string that was found; then nothing follows."""

    text: str
    stop: str | None


class StopStrings:
    """Watches one text for the stop string that ends first (of those, the longest).

    `include` lets the found string out too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
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
            longer = found is None or len(automaton.stop) > len(found.stop)
            if match_end < end or (match_end == end and longer):
                found, end = automaton, match_end
        whole = self._held + text[:end]
        if found is not None:
            self._held = ""
            cut = len(whole) - len(found.stop)
            return Scan(whole if self._include else whole[:cut], found.stop)
        keep = max((automaton.matched for automaton in self._automata), default=0)
        cut = len(whole) - keep
        self._held = whole[cut:]
        return Scan(whole[:cut], None)

    def flush(self) -> str:
        """What was held back, now that the text is over."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """One stop string; `matched` is how much of it the text so far ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _border_lengths(stop)

    def advance(self, text: str, *, armed: bool) -> int | None:
        """The end in `text` of the first match, or None. After a match the state is void."""
        stop, fallback, matched = self.stop, self._fallback, self.matched
        position, length = 0, len(text)
        while position < length:
            if matched == 0:
                position = text.find(stop[0], position)  # skip at C speed what cannot begin it
                if position < 0:
                    break
            char = text[position]
            while matched and char != stop[matched]:
                matched = fallback[matched - 1]
            if char == stop[matched]:
                matched += 1
            position += 1
            if matched == len(stop):
                if armed:
                    return position
                matched = fallback[matched - 1]
        self.matched = matched
        return None


def _border_lengths(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    lengths = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = lengths[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        lengths[i] = length
    return lengths
