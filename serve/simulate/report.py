"""The figures of one or more simulations as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from serve.simulate.figures import Figures, Spread


@dataclass(frozen=True, slots=True)
class Result:
    """One variant of the settings. `settings` are those in which the variants differ."""

    settings: dict[str, str]
    figures: Figures
    wall_s: float  # what the simulation took

    @property
    def speedup(self) -> float:
        """Simulated seconds per second."""
        return self.figures.duration_s / max(self.wall_s, 1e-9)


def as_json(result: Result) -> dict[str, Any]:
    """A result as plain values."""
    return {
        "settings": result.settings,
        "wall_s": round(result.wall_s, 3),
        "speedup": round(result.speedup, 1),
        **asdict(result.figures),
    }


def make_table(results: Sequence[Result]) -> Table:
    """One column per variant."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    for _ in results:
        table.add_column(justify="right")
    for name in results[0].settings:
        table.add_row(name, *(result.settings[name] for result in results), style="bold")
    table.add_section()
    for rows in _SECTIONS:
        for label, show in rows:
            table.add_row(label, *(show(result.figures) for result in results))
        table.add_section()
    table.add_row("faster than real time", *(f"{result.speedup:,.0f} ×" for result in results))
    return table


Row = tuple[str, Callable[[Figures], str]]


def _latencies(label: str, name: str) -> list[Row]:
    """The quantiles of one latency."""

    def show(figures: Figures, quantile: str) -> str:
        spread: Spread | None = getattr(figures, name)
        return "–" if spread is None else duration(getattr(spread, quantile))

    return [(f"{label} {q}", partial(show, quantile=q)) for q in ("p50", "p90", "p99")]


def duration(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


_SECTIONS: tuple[list[Row], ...] = (
    [
        ("requests finished", lambda f: f"{f.num_finished:,}"),
        ("requests refused", lambda f: f"{f.num_refused:,}"),
        ("duration", lambda f: duration(f.duration_s)),
        ("output tokens/s", lambda f: f"{f.output_tokens_per_s:,.0f}"),
        ("goodput, requests/s", lambda f: f"{f.goodput_per_s:.2f}"),
        ("goodput, share", lambda f: f"{f.good_share:.0%}"),
    ],
    _latencies("queue", "queue"),
    _latencies("TTFT", "ttft"),
    _latencies("TPOT", "tpot"),
    _latencies("ITL", "itl"),
    _latencies("end to end", "e2e"),
    [
        ("KV use, mean", lambda f: f"{f.kv_use:.0%}"),
        ("KV use, most", lambda f: f"{f.max_kv_use:.0%}"),
        ("prompt tokens cached", lambda f: f"{f.cached_share:.0%}"),
        ("preemptions, recompute", lambda f: f"{f.preemptions_recompute:,}"),
        ("preemptions, swap", lambda f: f"{f.preemptions_swap:,}"),
        ("most of one request", lambda f: f"{f.max_preemptions:,}"),
        ("tokens recomputed", lambda f: f"{f.tokens_recomputed:,}"),
        ("blocks swapped", lambda f: f"{f.blocks_swapped:,}"),
    ],
    [
        ("steps", lambda f: f"{f.num_steps:,}"),
        ("device busy", lambda f: f"{f.busy_share:.0%}"),
    ],
)
