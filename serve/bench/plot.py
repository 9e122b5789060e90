"""A run as one picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serve.bench.load import LoadRun
from serve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure that needs no display. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'serve-llm[bench]'.") from error
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def plot_run(path: Path, run: LoadRun, title: str) -> None:
    """Latency distributions, and tokens a second and open requests over time."""
    figure, (ttft, itl, rate, opened) = new_figure(2, 2, (10, 7))
    done = [record for record in run.records if record.error is None]
    _distribution(ttft, [record.ttft_s for record in done], "time to first token (s)")
    _distribution(itl, [gap for r in done for gap in r.gaps_s], "time between tokens (s)")
    times = np.array([when for record in done for when in record.token_times_s])
    bins = np.linspace(0, run.duration_s, 60)
    per_event = sum(r.num_tokens for r in done) / max(1, len(times))
    counts, edges = np.histogram(times, bins)
    rate.stairs(counts * per_event / np.diff(edges), edges)
    rate.set(xlabel="time (s)", ylabel="output tokens/s")
    moments = bins[:-1]
    spans = [(r.sent_s, r.token_times_s[-1]) for r in done]
    opened.stairs([sum(a <= m < b for a, b in spans) for m in moments], bins)
    opened.set(xlabel="time (s)", ylabel="open requests")
    opened.locator_params(axis="y", integer=True)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _distribution(axes: Axes, values: list[float], label: str) -> None:
    """The share of values below each value, on a logarithmic scale if they have one."""
    ordered = np.sort(np.array(values))
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)))
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1))
    if len(ordered) and ordered[0] > 0:
        ticks = log_ticks(float(ordered[0]), float(ordered[-1]))
        axes.set(xscale="log", xlim=(ticks[0], ticks[-1]))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()  # they would have labels, too, where the axis is short of a decade
    axes.grid(alpha=0.3)


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2, 5, 10 … from the last at or below `least` to the first at or above `most`: two or more,
    and far enough apart for their labels."""
    digits = (1, 2, 5) if most / least < 1e3 else (1,)
    exponents = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    ticks = [float(f"{digit}e{exponent}") for exponent in exponents for digit in digits]
    first = max(i for i, tick in enumerate(ticks) if tick <= least)
    last = min(i for i, tick in enumerate(ticks) if tick >= most and i > first)
    return ticks[first : last + 1]
