"""The GPU check keeps to its time: parts are cut at whole rows, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.gpu_machine import covered
from benchmarks.gpu_plan import Part, Row, plan_table, run_parts


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


def test_a_part_ends_before_a_row_that_would_exceed_its_time() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 3, 4, 4, 4), clock.part("second", 5, 1, 1)]

    found = run_parts(parts, clock)

    assert (len(found["first"].rows), found["first"].cut) == (2, True)
    assert (len(found["second"].rows), found["second"].cut) == (2, False)
    assert found["first"].seconds == 7


def test_time_that_is_left_over_is_the_next_parts() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 1), clock.part("second", 5, 3, 3, 3)]

    found = run_parts(parts, clock)

    assert (len(found["second"].rows), found["second"].cut) == (3, False)


def test_time_that_was_overdrawn_is_missing_at_the_end() -> None:
    clock = Time()
    parts = [clock.part("first", 10, 14), clock.part("second", 5, 1, 1)]

    found = run_parts(parts, clock)

    assert found["second"].rows == [{"row": 0}], "every part shows one row"
    assert found["second"].cut
    assert clock.now - 100 == 15


def test_the_plan_names_every_part_and_the_sum() -> None:
    clock = Time()

    text = plan_table([clock.part("one thing", 90, 1), clock.part("other", 10, 1)])

    assert [line.split()[-2] for line in text.splitlines()] == ["90", "10", "100"]


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5), (2, 3), (7, 8)], 5), ([(0, 9), (1, 2)], 9)],
)
def test_what_runs_side_by_side_counts_once(
    spans: list[tuple[float, float]], length: float
) -> None:
    assert covered(spans) == length
