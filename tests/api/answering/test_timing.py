"""A request's metrics from its choices' histories."""

from __future__ import annotations

from serve.api.answering.timing import request_metrics
from serve.api.protocol.common import RequestMetrics
from serve.messages import RequestTimes


def test_one_choice_is_told_exactly() -> None:
    times = [RequestTimes(10.0, 10.5, 11.0, 13.0, 2)]

    assert request_metrics(times, [5]) == RequestMetrics(
        queue_time_ms=500,
        time_to_first_token_ms=1000,
        generation_time_ms=2000,
        mean_itl_ms=500,
        tokens_per_second=2,
        num_preemptions=2,
    )


def test_several_choices_are_told_together() -> None:
    times = [RequestTimes(10.0, 10.5, 11.0, 13.0, 1), RequestTimes(10.0, 11.0, 12.0, 14.5, 3)]

    metrics = request_metrics(times, [3, 2])

    assert (metrics.queue_time_ms, metrics.time_to_first_token_ms) == (500, 1000)
    assert (metrics.generation_time_ms, metrics.mean_itl_ms) == (3500, 1500)
    assert (metrics.tokens_per_second, metrics.num_preemptions) == (1.25, 4)


def test_what_never_happened_is_null() -> None:
    scored = request_metrics([RequestTimes(10.0, 10.5, None, 11.0, 0)], [0])

    assert scored.queue_time_ms == 500
    assert scored.time_to_first_token_ms is scored.mean_itl_ms is scored.generation_time_ms is None
    assert request_metrics([], [0]).queue_time_ms is None
