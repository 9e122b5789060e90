"""Our histogram against the library's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from serve.api.figures.histogram import Histogram

BUCKETS = (0.001, 0.5, 1, 10)
values = st.one_of(st.sampled_from(BUCKETS), st.floats(0, 100))


@given(st.lists(values))
def test_it_shows_what_the_librarys_histogram_shows(observed: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("h", "Help.", BUCKETS, {"a": "b"})
    ours.register(histogram)
    library = LibraryHistogram("h", "Help.", ["a"], registry=theirs, buckets=BUCKETS).labels("b")
    for value in observed:
        histogram.observe(value)
        library.observe(value)

    expected = [
        line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line
    ]
    assert generate_latest(ours).decode().splitlines() == expected
