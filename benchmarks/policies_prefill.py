"""A short prompt behind a long one: in strict order, and as it passes."""

from __future__ import annotations

from matplotlib.axes import Axes

from benchmarks.policies_service import mixed_load
from benchmarks.policies_simulated import Comparison, outcome_of
from serve.simulate.figures import spread
from serve.simulate.report import duration
from serve.simulate.settings import MachineConfig
from serve.simulate.simulation import Outcome
from serve.simulate.workload import SimRequest

LONG_TOKENS = 30_000
BUDGET = 1024
ORDERS = {"strict order": False, "short ones pass": True}
LOADS: dict[str, list[SimRequest]] = {
    "alone": [],
    "one of 200 tokens": [SimRequest(0.05, ((1, 200),), 20)],
    "one of 1,400 tokens": [SimRequest(0.05, ((1, 1400),), 20)],
    "40 a second of 200": [SimRequest(0.025 * i, ((i, 200),), 20) for i in range(1, 200)],
    "400 a second of 200": [SimRequest(0.0025 * i, ((i, 200),), 20) for i in range(1, 1500)],
}
"""What comes while a prompt of LONG_TOKENS is prefilled."""


def prefill_orders() -> Comparison:
    """One long prompt and those that come behind it; then chats and many long ones."""
    rows, curves = [], {}
    for order, is_fair in ORDERS.items():
        for load, others in LOADS.items():
            long = SimRequest(0.0, ((100_000, LONG_TOKENS),), 20)
            outcome = run([long, *others], is_fair)
            waits = first_tokens(outcome, longer_than=LONG_TOKENS - 1)
            if load == "alone":
                (alone,) = waits
            rows.append(row(order, load, outcome, LONG_TOKENS - 1, alone))
        outcome = run(mixed_load(), is_fair)
        curves[order] = first_tokens(outcome, longer_than=0, up_to=5000)
        rows.append(row(order, "chats and documents", outcome, 5000, None))

    def draw_curves(axes: list[Axes]) -> None:
        (plot,) = axes
        for order, waits in curves.items():
            share = [(i + 1) / len(waits) for i in range(len(waits))]
            plot.semilogx(sorted(waits), share, label=order)
        plot.set_xlabel("time to first token of the chats, s")
        plot.set_ylabel("share of requests")
        plot.legend()

    return Comparison(
        "prefill",
        "A short prompt behind a long one",
        f"A prompt of {LONG_TOKENS:,} tokens begins, and others come while it is prefilled, in "
        f"steps of {BUDGET:,} tokens; last, the load of the comparison before, in which the long "
        "ones are the documents. Whose prompt is a sixteenth as long as what is left passes; the "
        "long one keeps half of each step. --no-fair-prefill is the strict order.",
        (
            "prompts",
            "what comes",
            "short TTFT p50",
            "short TTFT p99",
            "long TTFT p50",
            "to the long one alone",
        ),
        rows,
        1,
        draw_curves,
    )


def run(requests: list[SimRequest], is_fair: bool) -> Outcome:
    return outcome_of(
        requests,
        MachineConfig(),
        num_blocks=20_000,
        max_num_batched_tokens=BUDGET,
        fair_prefill=is_fair,
    )


def first_tokens(outcome: Outcome, longer_than: int, up_to: int = 1 << 30) -> list[float]:
    """Times to the first token, of prompts of these lengths."""
    return [
        history.ttft_s
        for history in outcome.histories
        if longer_than < history.request.prompt_len <= up_to
    ]


def row(
    order: str, load: str, outcome: Outcome, long_above: int, alone_s: float | None
) -> tuple[str, ...]:
    short = spread(first_tokens(outcome, 0, long_above))
    long = spread(first_tokens(outcome, long_above))
    assert long is not None
    return (
        order,
        load,
        "" if short is None else duration(short.p50),
        "" if short is None else duration(short.p99),
        duration(long.p50),
        "" if alone_s is None else f"{long.p50 / alone_s:.2f} x",
    )
