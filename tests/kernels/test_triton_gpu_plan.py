"""The GPU check keeps to its time: parts are cut at whole rows, and say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.gpu_machine import covered, device_seconds
from benchmarks.gpu_plan import (
    Outcome,
    Part,
    Row,
    plan_table,
    run_here,
    run_in_child,
    run_parts,
)


class Time:
    """A clock that rows move on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def part(self, name: str, seconds: float, *rows: float) -> Part:
        def run() -> Iterator[Row]:
            for number, took in enumerate(rows):
                self.now += took
                yield {"row": number}

        return Part(name, seconds, run)


def run(parts: list[Part], clock: Time) -> dict[str, Outcome]:
    return run_parts(parts, partial(run_here, clock=clock), lambda part, outcome: None, clock)


def test_a_part_ends_before_a_row_that_would_exceed_its_time() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 3, 4, 4, 4), clock.part("second", 5, 1, 1)]

    found = run(parts, clock)

    assert (len(found["first"].rows), found["first"].cut) == (2, True)
    assert (len(found["second"].rows), found["second"].cut) == (2, False)
    assert found["first"].seconds == 7


def test_time_that_is_left_over_is_the_next_parts() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 1), clock.part("second", 5, 3, 3, 3)]

    found = run(parts, clock)

    assert (len(found["second"].rows), found["second"].cut) == (3, False)


def test_time_that_was_overdrawn_is_missing_at_the_end() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 14), clock.part("second", 5, 1, 1)]

    found = run(parts, clock)

    assert found["second"].rows == [{"row": 0}], "every part shows one row"
    assert found["second"].cut
    assert clock.now - 100 == 15


def test_the_plan_names_every_part_and_the_sum() -> None:
    clock = Time()

    text = plan_table([clock.part("one thing", 90, 1), clock.part("other", 10, 1)])

    assert [line.split()[-2] for line in text.splitlines()] == ["90", "10", "100"]


CHILD = "from benchmarks.gpu_plan import *; rows = rows_alone_on_stdout(); "
PART = "serve_part(Part('p', 9, part), 9, rows)"


def child(body: str, **limits: float) -> Outcome:
    """A part whose rows are this generator's."""
    lines = body.replace("\n", "\n ")
    script = f"{CHILD}\ndef part():\n {lines}\n{PART}"
    return run_in_child([sys.executable, "-W", "ignore", "-c", script], 9, **limits)


def test_a_parts_process_tells_its_rows_whatever_else_it_prints() -> None:
    outcome = child("import os\nprint('noise')\nos.system('echo noise')\nyield {'a': 1}")
    assert (outcome.rows, outcome.error, outcome.passed) == ([{"a": 1}], None, True)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("yield {'a': 1}\nraise RuntimeError('illegal memory access')", "illegal memory access"),
        ("import os\nyield {'a': 1}\nos.abort()", "ended with status -6"),
        (
            "import os, sys\nyield {'a': 1}\nprint('its last words')\n"
            "sys.stderr.flush()\nos._exit(3)",
            "status 3\nits last words",
        ),
    ],
    ids=["raises", "dies", "leaves"],
)
def test_a_part_that_breaks_keeps_its_rows(body: str, error: str) -> None:
    outcome = child(body)
    assert outcome.rows == [{"a": 1}]
    assert error in (outcome.error or "")
    assert not outcome.passed


def test_a_part_that_hangs_is_ended() -> None:
    outcome = child("import time\nyield {'a': 1}\ntime.sleep(1000)", grace_s=-7)
    assert outcome.rows == [{"a": 1}]
    assert "ended after 2 s" in (outcome.error or "")


class Queue:
    """A device that works off what is queued while the host runs ahead."""

    def __init__(self) -> None:
        self.host = 0.0
        self.free_at = 0.0  # when the device will have done all that is queued
        self.marks: list[float] = []

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host) + seconds

    def host_seconds(self) -> float:
        return self.host

    def synchronize(self) -> None:
        self.host = max(self.host, self.free_at)

    def flush(self) -> None:
        self.work(65e-6)

    def sleep(self, seconds: float) -> None:
        self.work(seconds)

    def mark(self) -> float:
        self.work(0.0)
        return self.free_at

    def between(self, start: Any, end: Any) -> float:
        return float(end - start)


@pytest.mark.parametrize("launching", [10e-6, 900e-6, 0.02])
def test_the_time_of_the_device_has_no_python_in_it(launching: float) -> None:
    """However long the host takes, also where it is held up now and then."""
    queue, calls = Queue(), 0

    def run() -> None:
        nonlocal calls
        calls += 1
        held_up = 0.1 if calls % 7 == 0 else 0.0
        for _ in range(5):  # kernels
            queue.host += (launching + held_up) / 5
            queue.work(2e-6)

    assert device_seconds(run, queue) == pytest.approx(10e-6)
    assert calls > 22, "repeats whose launch was not hidden are done again"


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5), (2, 3), (7, 8)], 5), ([(0, 9), (1, 2)], 9)],
)
def test_what_runs_side_by_side_counts_once(
    spans: list[tuple[float, float]], length: float
) -> None:
    assert covered(spans) == length
