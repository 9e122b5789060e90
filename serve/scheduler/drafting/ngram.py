"""n-gram drafts: what followed the last time that the last few tokens occurred.

Source: A. Saxena, "Prompt Lookup Decoding" (2023); the most recent occurrence is taken, not the
first.
"""

from __future__ import annotations

from array import array

from serve.scheduler.drafting.drafter import NOTHING, Draft
from serve.scheduler.request import Request

WIDTH = 4
"""Bytes of a token id."""


class NGramDrafter:
    """Keeps each request's tokens as bytes, which C searches: no index to build or to store."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Fewest and most last tokens that must have occurred before."""
        self._shortest = shortest
        self._longest = longest
        self._texts: dict[Request, bytearray] = {}

    def propose(self, request: Request, most: int) -> Draft:
        """What followed the most recent occurrence of as many last tokens as can be found."""
        text = self._text(request)
        if self._find(text, self._shortest) < 0:  # then nor are more of them
            return NOTHING
        for length in range(self._longest, self._shortest - 1, -1):
            place = self._find(text, length)
            if place >= 0:
                return Draft(_read_on(text, place + WIDTH * length, most), length)
        raise AssertionError("the shortest was found before")

    def forget(self, request: Request) -> None:
        """Drop its bytes."""
        self._texts.pop(request, None)

    def _text(self, request: Request) -> bytearray:
        text = self._texts.setdefault(request, bytearray())
        text += array("i", request.token_ids[len(text) // WIDTH :]).tobytes()
        return text

    def _find(self, text: bytearray, length: int) -> int:
        """Where the last `length` tokens stand before, or -1; matches across ids do not count."""
        size, end = WIDTH * length, len(text) - WIDTH
        if end < size:
            return -1
        pattern = text[-size:]
        place = text.rfind(pattern, 0, end)
        while place % WIDTH and place >= 0:
            place = text.rfind(pattern, 0, place + size - 1)
        return place


def _read_on(text: bytearray, place: int, most: int) -> list[int]:
    """`most` tokens from there; at the text's end it goes on with what was just read, so that a
    period that fits more than once is drafted more than once."""
    found = array("i", bytes(text[place : place + WIDTH * most])).tolist()
    return [found[i % len(found)] for i in range(most)]
