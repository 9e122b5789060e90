"""Figures from records whose figures are known."""

from __future__ import annotations

import pytest

from serve.bench.load import LoadRun, RequestRecord
from serve.bench.summary import Spread, summarize


def record(sent: float, *times: float, tokens: int | None = None) -> RequestRecord:
    count = len(times) if tokens is None else tokens
    return RequestRecord(sent, sent, count, list(times), count, 10, 0, "usage")


def test_latencies_are_counted_from_sending() -> None:
    one = record(1.0, 1.5, 1.6, 1.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(0.9)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx([0.1, 0.3])


def test_tpot_divides_by_tokens_and_not_by_events() -> None:
    assert record(0.0, 1.0, 2.0, tokens=11).tpot_s == pytest.approx(0.1)


def test_tokens_that_came_at_once_have_no_tpot() -> None:
    assert record(0.0, 1.0, tokens=5).tpot_s is None
    assert record(0.0, 1.0).tpot_s is None


def test_throughput_counts_completed_requests_only() -> None:
    failed = RequestRecord(0.0, 0.25, 8, error="HTTP 500: oops")
    run = LoadRun([record(0.0, 1.0, 2.0), record(0.0, 1.0, 4.0), failed], 4.0, 0.5)
    figures = summarize(run, {"e2e": 3000})
    assert (figures.completed, figures.failed, figures.errors) == (2, 1, {"HTTP 500: oops": 1})
    assert (figures.output_tokens_per_s, figures.requests_per_s) == (1.0, 0.5)
    assert figures.total_tokens_per_s == 6.0
    assert (figures.good_share, figures.goodput_per_s) == (pytest.approx(1 / 3), 0.25)
    assert figures.max_send_delay_ms == 250.0


def test_percentiles_are_those_of_the_values() -> None:
    spread = Spread.of([i / 1000 for i in range(101)])
    assert spread == Spread(mean=50, p50=50, p90=90, p95=95, p99=99, max=100)
    assert Spread.of([]) is None
