"""Figures for the terminal and for files."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serve.bench.load import LoadRun
from serve.bench.summary import Spread, Summary


def show(summary: Summary, console: Console) -> None:
    """Print the figures."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(justify="right")
    for name, value in _facts(summary):
        facts.add_row(name, value)
    console.print(facts)
    latencies = Table("ms", *("mean", "p50", "p90", "p95", "p99", "max"), box=None)
    for column in latencies.columns[1:]:
        column.justify = "right"
    for name, spread in _spreads(summary).items():
        if spread is not None:
            latencies.add_row(name, *(f"{value:.1f}" for value in asdict(spread).values()))
    console.print(latencies)
    for error, count in summary.errors.items():
        console.print(f"{count} × {error}", style="red", markup=False)


def _facts(summary: Summary) -> Sequence[tuple[str, str]]:
    facts = [
        ("requests completed", str(summary.completed)),
        ("requests failed", str(summary.failed)),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens", f"{summary.prompt_tokens} ({summary.cached_tokens} from a cache)"),
        ("output tokens", str(summary.output_tokens)),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("all tokens/s", f"{summary.total_tokens_per_s:.1f}"),
    ]
    if summary.goodput_per_s is not None and summary.good_share is not None:
        limits = " ".join(f"{k}:{v:g}" for k, v in summary.goodput_limits_ms.items())
        goodput = f"{summary.goodput_per_s:.2f} requests/s, {summary.good_share:.0%}"
        facts.append((f"goodput ({limits})", goodput))
    if summary.wrong_length:
        facts.append(("other length than asked for", str(summary.wrong_length)))
    if "events" in summary.counted_by:
        facts.append(("tokens counted by", "events: this server gives no usage"))
    busy = f"{summary.client_cpu_s:.2f} s CPU, {summary.max_send_delay_ms:.1f} ms late at most"
    return [*facts, ("this client", busy)]


def _spreads(summary: Summary) -> dict[str, Spread | None]:
    return {
        "first token (TTFT)": summary.ttft_ms,
        "per later token (TPOT)": summary.tpot_ms,
        "between tokens (ITL)": summary.itl_ms,
        "end to end": summary.e2e_ms,
    }


def write_json(path: Path, settings: Mapping[str, Any], summary: Summary, run: LoadRun) -> None:
    """All of a run: where, when, what was asked, the figures, and every request."""
    content = {
        "date": time.strftime("%F %T%z"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "settings": settings,
        "summary": summary.as_dict(),
        "requests": [asdict(record) for record in run.records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, default=str) + "\n", encoding="utf-8")
