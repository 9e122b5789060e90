"""What benchmarks.gpu_check measures, in order, and the seconds each part may take.

A part yields rows, the most telling first. It is cut before a row that would probably end after its
time, taking the longest row so far for a measure; time that a part leaves over is the next ones'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Row = dict[str, object]


@dataclass(frozen=True)
class Part:
    """One table of the report."""

    name: str
    seconds: float
    rows: Callable[[], Iterator[Row]]


@dataclass(frozen=True)
class Outcome:
    """A table, how long it took, and whether its time was over, so that rows may be missing."""

    rows: list[Row]
    seconds: float
    cut: bool


def run_parts(parts: list[Part], clock: Callable[[], float] = time.monotonic) -> dict[str, Outcome]:
    """All parts, one after another, within their seconds taken together."""
    end = clock()
    found = {}
    for part in parts:
        end += part.seconds
        found[part.name] = _run(part, end, clock)
    return found


def _run(part: Part, end: float, clock: Callable[[], float]) -> Outcome:
    started = before = clock()
    rows: list[Row] = []
    longest = 0.0
    for row in part.rows():
        rows.append(row)
        now = clock()
        longest, before = max(longest, now - before), now
        if now + longest > end:
            return Outcome(rows, now - started, cut=True)
    return Outcome(rows, clock() - started, cut=False)


def plan_table(parts: list[Part]) -> str:
    """The plan, to be read before it is carried out."""
    lines = [f"  {part.name:<20}{part.seconds:>6.0f} s" for part in parts]
    return "\n".join([*lines, f"  {'at most':<20}{sum(part.seconds for part in parts):>6.0f} s"])
