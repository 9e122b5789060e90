"""Where texts are encoded, decoded and rendered: off the event loop, the short apart from the long.

A text of megabytes takes seconds, and some requests bring several. Short texts have a thread that
no long one ever enters, so that they wait for other short ones at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SHORT_CHARS = 16_384
"""Texts up to this size count as short: encoding one takes a few milliseconds."""
NUM_LONG_THREADS = 2
_ITEM_CHARS = 16  # what a text, a list or an object costs beside its characters

T = TypeVar("T")


class TokenizerThreads:
    """Two pools of threads. `close` lets them go."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-short")
        self._long = ThreadPoolExecutor(NUM_LONG_THREADS, thread_name_prefix="tokenizer-long")

    async def run(self, work: Callable[[], T], *about: object) -> T:
        """The result of `work`, which is `about` these texts, lists and objects."""
        pool = self._short if _left(about, SHORT_CHARS) >= 0 else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Begin nothing more."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def _left(value: object, budget: int) -> int:
    """What is left of a budget of characters after a value; stops looking when nothing is."""
    if isinstance(value, str):
        return budget - _ITEM_CHARS - len(value)
    if isinstance(value, Mapping):
        return _left_of_all(value.values(), budget)
    if isinstance(value, Iterable):
        return _left_of_all(value, budget)
    return budget - 1


def _left_of_all(values: Iterable[object], budget: int) -> int:
    budget -= _ITEM_CHARS
    for value in values:
        if budget < 0:
            break
        budget = _left(value, budget)
    return budget
