"""What benchmarks.gpu_check measures, in order, the seconds each part may take, and how it is run.

A part yields rows, the most telling first. It is cut before a row that would probably end after its
time, taking the longest row so far for a measure; time that a part leaves over is the next ones'.
Each part runs in a process of its own: an error that spoils the GPU's context, or a process that
hangs, costs the rest of one part, and neither the rows before it nor the other parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TextIO

Row = dict[str, object]

GRACE_S = 45.0
"""How much longer than its time a part may take before it is ended: a row is never cut short."""
_ERROR_CHARACTERS = 4000


@dataclass(frozen=True)
class Part:
    """One table of the report."""

    name: str
    seconds: float  # its process' start included
    rows: Callable[[], Iterator[Row]]


@dataclass
class Outcome:
    """A table, how long it took, whether its time was over, so that rows may be missing, and what
    stopped it."""

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    cut: bool = False
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it came to an end, and nothing it checked was wrong."""
        return self.error is None and all(row.get("passed", True) for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


Run = Callable[[Part, float], Outcome]
"""Carries out a part within so many seconds."""


def run_parts(
    parts: Sequence[Part],
    run: Run,
    done: Callable[[Part, Outcome], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """All parts, one after another, within their seconds taken together; `done` hears of each at
    once."""
    end = clock()
    found = {}
    for part in parts:
        end += part.seconds
        found[part.name] = run(part, end - clock())
        done(part, found[part.name])
    return found


def run_here(
    part: Part,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[Row], None] = lambda row: None,
) -> Outcome:
    """In this process, `report` being told of every row as soon as it is there."""
    started = before = clock()
    outcome, longest = Outcome(), 0.0
    try:
        for row in part.rows():
            outcome.rows.append(row)
            report(row)
            now = clock()
            longest, before = max(longest, now - before), now
            if now + longest > started + seconds:
                outcome.cut = True
                break
    except Exception:  # whatever it is, it is the part's result
        outcome.error = traceback.format_exc()[-_ERROR_CHARACTERS:]
    outcome.seconds = clock() - started
    return outcome


def serve_part(part: Part, seconds: float, rows: TextIO) -> None:
    """The child's side of `run_in_child`: a line for each row, and one for the end."""

    def tell(kind: str, value: object) -> None:
        rows.write(json.dumps({kind: value}) + "\n")
        rows.flush()

    outcome = run_here(part, seconds, report=lambda row: tell("row", row))
    tell("end", {"cut": outcome.cut, "error": outcome.error})


def rows_alone_on_stdout() -> TextIO:
    """This process' standard output for rows, and for nothing else: what is printed goes to
    standard error from now on."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return rows


def run_in_child(command: Sequence[str], seconds: float, grace_s: float = GRACE_S) -> Outcome:
    """A part that `command` serves."""
    started = time.monotonic()
    outcome, ended = Outcome(), False
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=log, text=True)
        limit = max(0.0, seconds) + grace_s
        timer = threading.Timer(limit, child.kill)
        timer.start()
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                match json.loads(line):
                    case {"row": row}:
                        outcome.rows.append(row)
                    case {"end": end}:
                        outcome.cut, outcome.error, ended = end["cut"], end["error"], True
        status = child.wait()
        timer.cancel()
        log.seek(0)
        said = log.read()[-_ERROR_CHARACTERS:]
    outcome.seconds = time.monotonic() - started
    if not ended:
        late = outcome.seconds >= limit
        why = f"ended after {limit:.0f} s" if late else f"its process ended with status {status}"
        outcome.error = f"{why}\n{said}"
    return outcome


def plan_table(parts: Sequence[Part]) -> str:
    """The plan, to be read before it is carried out."""
    lines = [f"  {part.name:<20}{part.seconds:>6.0f} s" for part in parts]
    return "\n".join([*lines, f"  {'at most':<20}{sum(part.seconds for part in parts):>6.0f} s"])
