"""Continuous against static batching: same model, dtype, machine, HTTP interface and arrivals.

    python -m benchmarks.static_vs_continuous --model DIR

Static: transformers `generate` over batches of whole requests (`static_server`), its batch size the
best of a sweep. Continuous: our server. Poisson arrivals, outputs of 8 to 256 tokens.

Two first-token times are shown for static batching: "whole", when a request's whole answer arrives
(all of a batch are returned when the slowest ends, as classical static batching does), and
"streamed", when tokens are passed on while the batch runs (the kindest reading: waiting for a batch
plus its prefill). Ours always streams. A server's rates are tried from low to high and stop after
the first at which p95 of its first-token time is four times over the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.servers import RunningServer, ServerCommand, end_on_sigterm, free_port
from serve.bench.online import measure
from serve.bench.options import ArrivalOptions, ReportOptions, TargetOptions, WorkloadOptions
from serve.bench.plot import new_figure
from serve.bench.summary import Summary

HERE = Path(__file__).parent
LIMIT_MS = 1000.0
HOPELESS = 4.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server, and whether its answers are streamed."""

    name: str
    command: ServerCommand
    stream: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a measured request failed."""
    options = _parse(argv)
    end_on_sigterm()
    workload = WorkloadOptions(input_len=options.input_len, output_len=options.output_len)
    rates = [float(rate) for rate in options.qps.split(",")]
    log_folder = options.out / "logs"

    sweep = {
        size: batch_rate(static_command(options, size), workload, size, log_folder)
        for size in map(int, options.batch_sizes.split(","))
    }
    best = max(sweep, key=lambda size: sweep[size]["useful_tokens_per_s"])
    for size, figures in sweep.items():
        print(f"static batch {size}: {figures}{'  <- best' if size == best else ''}", flush=True)

    static = static_command(options, best)
    contestants = [
        Contestant("continuous (ours)", ours_command(options), stream=True),
        Contestant("static, streamed", static, stream=True),
        Contestant("static, whole", static, stream=False),
    ]
    rows = []
    for contestant in contestants:
        with RunningServer(contestant.command, _port_of(contestant.command), log_folder) as server:
            rows += climb(contestant, server, workload, rates, options)
    report = {
        "command": "python -m benchmarks.static_vs_continuous " + " ".join(argv or sys.argv[1:]),
        "machine": machine.describe(),
        "rates": machine.measure_rates().as_dict(),
        "model": str(options.model),
        "dtype": options.dtype,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "limit_ms": LIMIT_MS,
        "batch_sizes": sweep,
        "best_batch_size": best,
        "rows": rows,
    }
    report["sustained_qps"] = {c.name: sustained(rows, c.name) for c in contestants}
    table = markdown(report)
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "static_vs_continuous.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "static_vs_continuous.md").write_text(table)
    plot(options.out / "static_vs_continuous.png", rows)
    return 1 if any(row["failed"] for row in rows) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.static_vs_continuous", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="float32", help="of both servers")
    parser.add_argument("--qps", default="0.25,0.5,1,1.5,2,3,4", help="rates to try, ascending")
    parser.add_argument(
        "--refine", type=int, default=2, help="rates tried between the last good and the first bad"
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="length of the arrivals at each rate"
    )
    parser.add_argument("--batch-sizes", default="8,16,32", help="of the static server's sweep")
    parser.add_argument(
        "--max-wait", type=float, default=0.05, help="seconds for a static batch to fill"
    )
    parser.add_argument("--input-len", default="32")
    parser.add_argument("--output-len", default="8:256")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args(argv)


def static_command(options: argparse.Namespace, batch_size: int) -> ServerCommand:
    """The static server with this batch size."""
    command = (sys.executable, "-m", "benchmarks.static_server", "--model", str(options.model))
    flags = ("--dtype", options.dtype, "--max-wait", str(options.max_wait), "--batch-size")
    port = ("--port", str(free_port()))
    return ServerCommand(
        name=f"static-{batch_size}", command=(*command, *flags, str(batch_size), *port)
    )


def ours_command(options: argparse.Namespace) -> ServerCommand:
    """Our server as it comes."""
    command = (sys.executable, "-m", "serve.cli", "serve", str(options.model))
    flags = ("--dtype", options.dtype, "--served-model-name", "smollm2", "--disable-log-requests")
    port = ("--port", str(free_port()))
    return ServerCommand(name="continuous", command=(*command, *flags, *port))


def _port_of(command: ServerCommand) -> int:
    return int(command.command[-1])


def batch_rate(
    command: ServerCommand, workload: WorkloadOptions, size: int, log_folder: Path
) -> dict[str, float]:
    """What the static server reaches with two full batches and nothing else in line."""
    with RunningServer(command, _port_of(command), log_folder) as server:
        one_load(server, replace(workload, num_prompts=2, output_len="4"), None, stream=False)
        before = stats(server)
        summary = one_load(server, replace(workload, num_prompts=2 * size), None, stream=False)
        after = stats(server)
    computed = after["computed_tokens"] - before["computed_tokens"]
    return {
        "useful_tokens_per_s": round(summary.output_tokens_per_s, 1),
        "computed_tokens_per_s": round(computed / summary.duration_s, 1),
        "useful_share": round(summary.output_tokens / computed, 3),
    }


def climb(
    contestant: Contestant,
    server: RunningServer,
    workload: WorkloadOptions,
    rates: Sequence[float],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row for each rate, upwards until hopeless; then between the last good and first bad."""
    one_load(server, replace(workload, num_prompts=4, output_len="8"), None, contestant.stream)
    rows: list[dict[str, Any]] = []

    def attempt(rate: float) -> float:
        rows.append(_row(contestant, server, workload, rate, options.seconds))
        print(_line(rows[-1]), flush=True)
        return float(rows[-1]["ttft_p95"])

    for rate in rates:
        if attempt(rate) > HOPELESS * LIMIT_MS:
            break
    good = [row["qps"] for row in rows if row["ttft_p95"] <= LIMIT_MS]
    bad = [row["qps"] for row in rows if row["ttft_p95"] > LIMIT_MS]
    if good and bad:
        low, high = max(good), min(bad)
        for _ in range(options.refine):
            middle = round((low + high) / 2, 3)
            if attempt(middle) <= LIMIT_MS:
                low = middle
            else:
                high = middle
    return rows


def _row(
    contestant: Contestant,
    server: RunningServer,
    workload: WorkloadOptions,
    rate: float,
    seconds: float,
) -> dict[str, Any]:
    count = max(4, round(rate * seconds))
    before = stats(server) if "static" in contestant.name else {}
    summary = one_load(server, replace(workload, num_prompts=count), rate, contestant.stream)
    after = stats(server) if before else {}
    ttft, e2e, tpot = summary.ttft_ms, summary.e2e_ms, summary.tpot_ms
    if ttft is None or e2e is None:
        raise SystemExit(f"{contestant.name} answers nothing: {summary.errors}")
    computed = after["computed_tokens"] - before["computed_tokens"] if before else None
    return {
        "server": contestant.name,
        "qps": rate,
        "requests": count,
        "failed": summary.failed,
        "ttft_mean": ttft.mean,
        "ttft_p50": ttft.p50,
        "ttft_p95": ttft.p95,
        "e2e_p50": e2e.p50,
        "e2e_p95": e2e.p95,
        "tpot_p50": tpot.p50 if tpot else None,
        "requests_per_s": summary.requests_per_s,
        "tokens_per_s": summary.output_tokens_per_s,
        "useful_share": summary.output_tokens / computed if computed else 1.0,
    }


def one_load(
    server: RunningServer, workload: WorkloadOptions, rate: float | None, stream: bool
) -> Summary:
    """Run one load; the same prompts for every server and rate of the same size."""
    target = TargetOptions(base_url=server.url, model="smollm2", stream=stream)
    arrivals = ArrivalOptions(request_rate=rate or float("inf"), num_warmups=0)
    workload = replace(workload, seed=workload.num_prompts)
    return measure(target, workload, arrivals, ReportOptions(progress=False)).summary


def stats(server: RunningServer) -> dict[str, int]:
    """The static server's counters."""
    with urllib.request.urlopen(f"{server.url}/stats", timeout=10) as answer:
        counters: dict[str, int] = json.load(answer)
        return counters


def sustained(rows: Sequence[dict[str, Any]], name: str) -> float:
    """The highest rate tried with p95 TTFT within the limit; 0 when there is none."""
    return max(
        (row["qps"] for row in rows if row["server"] == name and row["ttft_p95"] <= LIMIT_MS),
        default=0.0,
    )


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['server']:<18} {row['qps']:6.2f} QPS: TTFT p50 {row['ttft_p50']:8.0f} "
        f"p95 {row['ttft_p95']:8.0f} ms, {row['tokens_per_s']:6.1f} tok/s, "
        f"useful {row['useful_share']:.0%}"
    )


def markdown(report: dict[str, Any]) -> str:
    """Rates down, servers across."""
    about, rows = report["machine"], report["rows"]
    names = list(report["sustained_qps"])
    found = {(row["server"], row["qps"]): row for row in rows}
    lines = [
        f"`{report['command']}`, {about['date']}, {about['cpu']}, {about['cores']} cores, "
        f"{report['dtype']}; prompts of {report['input_len']} and outputs of "
        f"{report['output_len']} tokens, Poisson; static batches of {report['best_batch_size']} "
        "(the best of the sweep).",
        "",
        "| QPS | " + " | ".join(f"{name}: TTFT p50 / p95 (ms) · tok/s" for name in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for qps in sorted({row["qps"] for row in rows}):
        cells = [_cell(found.get((name, qps))) for name in names]
        lines.append(f"| {qps:g} | " + " | ".join(cells) + " |")
    lines += ["", f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    highest = [f"{qps:g}" if qps else "none" for qps in report["sustained_qps"].values()]
    lines.append(f"| highest QPS with p95 TTFT ≤ {LIMIT_MS:g} ms | " + " | ".join(highest) + " |")
    shares = [_useful_share(rows, name) for name in names]
    lines.append("| computed tokens that someone had asked for | " + " | ".join(shares) + " |")
    return "\n".join([*lines, ""])


def _useful_share(rows: Sequence[dict[str, Any]], name: str) -> str:
    shares = [row["useful_share"] for row in rows if row["server"] == name]
    return f"{min(shares):.0%} – {max(shares):.0%}" if min(shares) < 1 else "100%"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['ttft_p50']:.0f} / {row['ttft_p95']:.0f} · {row['tokens_per_s']:.0f}"


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """p95 of the first-token time and throughput, by rate."""
    figure, (ttft, rate) = new_figure(1, 2, (11, 4.5))
    for name in dict.fromkeys(row["server"] for row in rows):
        mine = sorted((row for row in rows if row["server"] == name), key=lambda row: row["qps"])
        qps = [row["qps"] for row in mine]
        ttft.plot(qps, [row["ttft_p95"] / 1e3 for row in mine], marker="o", label=name)
        rate.plot(qps, [row["tokens_per_s"] for row in mine], marker="o", label=name)
    ttft.axhline(LIMIT_MS / 1e3, color="grey", linestyle=":")
    ttft.set(xlabel="requests a second", ylabel="p95 time to first token (s)", yscale="log")
    rate.set(xlabel="requests a second", ylabel="useful output tokens a second")
    for axes in (ttft, rate):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"static and continuous batching, {time.strftime('%F')}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
