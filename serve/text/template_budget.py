"""What one rendering of a template may cost: time, and the text and lists that it makes.

A template is a program of somebody else, and Python's operators on strings and lists are as good as
loops: `'a' * 10**9` needs none. So whatever makes text or lists asks here first. The budget of the
rendering that a thread is at is found through a context variable: Jinja calls back from places
(finishing a value, joining the output) that are handed nothing of ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from jinja2.utils import Namespace

MAX_CHARS: Final = 1 << 24
"""Of one text, the prompt included."""
MAX_TOTAL_BYTES: Final = 1 << 28
"""Of all texts and lists that a rendering makes on its way."""
MAX_ITEMS: Final = 1 << 18
"""Of one list."""
MAX_BITS: Final = 1 << 14
"""Of a whole number."""
_ITEM_CHARS: Final = 64  # what each value within a value counts for, where it is shown
_MAX_DEPTH: Final = 200  # of lists in lists; JSON of a request may nest as deep
_CONTAINERS: Final = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class OutOfTime(Exception):
    """The rendering passed its deadline."""


class TooLarge(Exception):
    """The template asked for more than a rendering may have; the text says of what."""


def check_chars(num_chars: int) -> None:
    """Whether a text may be so long. Raises TooLarge."""
    if num_chars > MAX_CHARS:
        raise TooLarge(f"a text of {num_chars:,} characters; at most {MAX_CHARS:,} are made")


def check_items(num_items: int) -> None:
    """Whether a list may be so long. Raises TooLarge."""
    if num_items > MAX_ITEMS:
        raise TooLarge(f"a list of {num_items:,} items; at most {MAX_ITEMS:,} are made")


class Budget:
    """What one rendering has spent, and until when it may go on."""

    def __init__(self, time_limit_s: float) -> None:
        self._deadline = time.monotonic() + time_limit_s
        self.spent_bytes = 0

    def check_time(self) -> None:
        """Raises OutOfTime after the deadline."""
        if time.monotonic() > self._deadline:
            raise OutOfTime

    def spend(self, value: object) -> None:
        """A text or list has just been made, its length checked before. Raises TooLarge."""
        if isinstance(value, str | bytes):
            check_chars(len(value))
        elif isinstance(value, list | tuple):
            check_items(len(value))
        else:
            return
        self.spend_bytes(sys.getsizeof(value))

    def spend_bytes(self, num_bytes: int) -> None:
        """Memory for something else. Raises TooLarge."""
        self.spent_bytes += num_bytes
        if self.spent_bytes > MAX_TOTAL_BYTES:
            raise TooLarge(f"more than {MAX_TOTAL_BYTES:,} bytes of texts and lists in all")


_current: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def spending(time_limit_s: float) -> Iterator[Budget]:
    """Work within a fresh budget."""
    fresh = Budget(time_limit_s)
    token = _current.set(fresh)
    try:
        yield fresh
    finally:
        _current.reset(token)


def budget() -> Budget:
    """That of the rendering which this thread is at."""
    return _current.get()


def bounded_list(values: Iterable[Any]) -> list[Any]:
    """The values of an iterator, whose number nobody knows beforehand."""
    spent = budget()
    found = []
    for value in values:
        spent.check_time()
        found.append(value)
        check_items(len(found))
    spent.spend(found)
    return found


def check_number(value: object) -> None:
    """Raises TooLarge for a whole number that arithmetic has no end with."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TooLarge(f"a number of more than {MAX_BITS:,} bits")


def weigh(value: object) -> int:
    """About how many characters a value has as text.

    Lists may hold each other many times over, so that showing, comparing or hashing a small one
    takes for ever. Raises TooLarge for a value that is too large or nested too deep for that.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if value is None or isinstance(value, bool | float):
        return _ITEM_CHARS
    total = 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        total += _ITEM_CHARS
        children: Sequence[Any] = ()
        if isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, int):
            check_number(each)
            total += each.bit_length() // 3
        elif isinstance(each, Mapping):
            children = [part for item in each.items() for part in item]
        elif isinstance(each, _CONTAINERS):
            children = list(each)
        elif isinstance(each, Namespace):
            raise TooLarge("a namespace shown or compared as a whole")
        if total > MAX_CHARS or len(children) + len(waiting) > MAX_ITEMS:
            raise TooLarge(f"a value of more than {MAX_CHARS:,} characters")
        if children and depth == _MAX_DEPTH:
            raise TooLarge(f"lists nested more than {_MAX_DEPTH} deep")
        waiting += [(child, depth + 1) for child in children]
    return total
