"""The axis of a picture can be read whatever was measured."""

from __future__ import annotations

import pytest

from serve.bench.plot import log_ticks


@pytest.mark.parametrize(
    ("least", "most", "ticks"),
    [
        (0.06, 0.09, [0.05, 0.1]),
        (0.02, 0.3, [0.02, 0.05, 0.1, 0.2, 0.5]),
        (0.1, 0.1, [0.1, 0.2]),
        (0.004, 70, [0.001, 0.01, 0.1, 1, 10, 100]),
    ],
)
def test_ticks_enclose_the_values_and_keep_their_distance(
    least: float, most: float, ticks: list[float]
) -> None:
    assert log_ticks(least, most) == ticks
