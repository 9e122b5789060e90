"""Figures of outcomes small enough to check by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.messages import EngineStats
from serve.simulate.figures import Spread, Targets, figures_of, spread
from serve.simulate.simulation import History, Outcome
from serve.simulate.workload import SimRequest


def history(arrival_s: float, *token_times: float, refusal: str | None = None) -> History:
    request = SimRequest(arrival_s, ((0, 10),), max(1, len(token_times)))
    return History(request, list(token_times), arrival_s, 0, 0, refusal)


def outcome(*histories: History, end_s: float = 10.0) -> Outcome:
    return Outcome(list(histories), EngineStats(), end_s, 7, 5.0, 0.25, 0.5)


def test_goodput_counts_requests_that_kept_both_targets() -> None:
    good, late = history(0, 1.0, 1.5, 2.0), history(0, 4.0, 4.5)
    slow, lone = history(0, 1.0, 3.0), history(5, 6.0)
    refused = history(0, refusal="no room")
    figures = figures_of(outcome(good, late, slow, lone, refused), Targets(ttft_s=2.0, tpot_s=0.5))
    assert (figures.num_finished, figures.num_refused) == (4, 1)
    assert figures.goodput_per_s == 0.2
    assert figures.good_share == 0.4


def test_latencies_come_from_token_times() -> None:
    figures = figures_of(outcome(history(1.0, 2.0, 2.5, 4.0)), Targets(ttft_s=9, tpot_s=9))
    assert figures.ttft == Spread(1.0, 1.0, 1.0, 1.0)
    assert figures.tpot == Spread(1.0, 1.0, 1.0, 1.0)
    assert figures.itl == Spread(0.5, 1.5, 1.5, 1.5)
    assert figures.e2e == Spread(3.0, 3.0, 3.0, 3.0)
    assert (figures.output_tokens_per_s, figures.busy_share) == (0.3, 0.5)


def test_nothing_measured_is_none() -> None:
    assert figures_of(outcome(history(0, 1.0)), Targets(ttft_s=1, tpot_s=1)).itl is None


@given(st.lists(st.floats(0, 100), min_size=1))
def test_quantiles_are_values_that_occurred_and_in_order(values: list[float]) -> None:
    found = spread(values)
    assert found is not None
    assert found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert {found.p50, found.p90, found.p99} <= set(values)
    assert sum(value <= found.p50 for value in values) >= len(values) / 2
