"""How long a request took, from its choices' histories."""

from __future__ import annotations

from collections.abc import Sequence

from serve.api.protocol.common import RequestMetrics
from serve.messages import RequestTimes


def request_metrics(times: Sequence[RequestTimes], generated: Sequence[int]) -> RequestMetrics:
    """`times`: of the choices that have ended; `generated`: tokens of each choice."""
    arrival = min((t.arrival_time for t in times), default=None)
    start = min((t.first_scheduled_time for t in times if t.first_scheduled_time), default=None)
    first = min((t.first_token_time for t in times if t.first_token_time), default=None)
    end = max((t.finished_time for t in times), default=None)
    between = sum(t.finished_time - t.first_token_time for t in times if t.first_token_time)
    num_gaps = sum(number - 1 for number in generated if number)
    whole = _span_ms(start, end)
    return RequestMetrics(
        queue_time_ms=_span_ms(arrival, start),
        time_to_first_token_ms=_span_ms(arrival, first),
        generation_time_ms=_span_ms(first, end),
        mean_itl_ms=between * 1000 / num_gaps if num_gaps else None,
        tokens_per_second=sum(generated) * 1000 / whole if whole else None,
        num_preemptions=sum(t.num_preemptions for t in times),
    )


def _span_ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1000
