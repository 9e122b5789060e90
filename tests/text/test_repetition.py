"""When an output counts as repeating itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import InvalidRequest
from serve.sampling_params import RepetitionDetection
from serve.text.repetition import RepetitionDetector


def first_repetition(token_ids: list[int], wanted: RepetitionDetection) -> int | None:
    """The slow obvious answer: every end, every size."""
    for end in range(1, len(token_ids) + 1):
        for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
            pattern = token_ids[end - size : end] if end >= size else []
            tail = token_ids[max(0, end - size * wanted.min_count) : end]
            if pattern and tail == pattern * wanted.min_count:
                return end
    return None


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted),
    count=st.integers(2, 4),
    cuts=st.lists(st.integers(1, 4), min_size=40, max_size=40),
)
def test_the_first_repetition_is_found_however_the_tokens_arrive(
    token_ids: list[int], sizes: list[int], count: int, cuts: list[int]
) -> None:
    wanted = RepetitionDetection(
        max_pattern_size=sizes[1], min_pattern_size=sizes[0] if sizes[1] else 0, min_count=count
    )
    detector, seen, found = RepetitionDetector(wanted, 0), 0, None
    for cut in cuts:
        fresh = token_ids[seen : seen + cut]
        number = detector.push(fresh)
        if number is not None:
            found = seen + number
            break
        seen += len(fresh)

    assert found == first_repetition(token_ids, wanted)


def test_nothing_counts_before_the_least_number_of_tokens() -> None:
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=1, min_count=2), 5)

    assert detector.push([7, 7, 7, 7]) is None
    assert detector.push([7]) == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_pattern_size", {"max_pattern_size": -1}),
        ("max_pattern_size", {"max_pattern_size": 513}),
        ("min_pattern_size", {"max_pattern_size": 2, "min_pattern_size": 3}),
        ("min_count", {"max_pattern_size": 2, "min_count": 1}),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, values: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RepetitionDetection(**values)

    assert caught.value.param == f"repetition_detection.{field}"
