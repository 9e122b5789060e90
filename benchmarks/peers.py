"""Our server and others on the same loads, interleaved: ratios that a drifting machine cannot bend.

    python -m benchmarks.peers --peers-home DIR [--only vllm-fp32,llama-f16] [--loads 1,2,3,4]

For each peer found installed, ours and the peer are both started; then every load runs on one and
at once on the other, in turns (A B, B A, …), while whichever is not measured is stopped (SIGSTOP).
Ratios are ours / peer within a pair of neighbouring runs: median, least and greatest over rounds.
Above 1 is better for us in all columns: latencies are divided the other way round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import loads, machine
from benchmarks.servers import (
    RunningServer,
    ServerCommand,
    ServerFailed,
    end_on_sigterm,
    free_port,
)
from serve.bench.summary import Summary

HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a measured request failed."""
    options = _parse(argv)
    end_on_sigterm()
    known = read_commands(options.peers, options.peers_home)
    chosen = [
        loads.smaller(load) if options.smoke else load for load in loads.find_loads(options.loads)
    ]
    ours = known[options.ours]
    if ours.missing:
        raise SystemExit(f"ours cannot start: {ours.missing} is not there")
    names = (
        options.only.split(",") if options.only else [n for n in known if not n.startswith("ours")]
    )
    report: dict[str, Any] = {
        "command": "python -m benchmarks.peers " + " ".join(argv or sys.argv[1:]),
        "machine": machine.describe(),
        "ours": options.ours,
        "pairs": [],
        "skipped": {},
    }
    for name in names:
        if missing := known[name].missing:
            report["skipped"][name] = f"{missing} is not there"
            print(f"{name}: skipped, {missing} is not there", flush=True)
            continue
        try:
            report["pairs"].append(compare(ours, known[name], chosen, options))
        except ServerFailed as error:
            report["skipped"][name] = str(error)
            print(f"{name}: skipped, {error}", flush=True)
    table = markdown(report)
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "peers.md").write_text(table)
    failed = [row for pair in report["pairs"] for row in pair["runs"] if row["failed"]]
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--peers-home", type=Path, required=True, help="folder with their installations"
    )
    parser.add_argument(
        "--peers", type=Path, default=HERE / "peers.yaml", help="how they are started"
    )
    parser.add_argument("--ours", default="ours", help="which entry of that file is ours")
    parser.add_argument("--only", help="peers to compare with, comma separated; default: all")
    parser.add_argument("--loads", default="1,2,3,4,prefix", help="comma separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args(argv)


def read_commands(path: Path, home: Path) -> dict[str, ServerCommand]:
    """The file's servers, placeholders filled except {port}."""
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    cores = machine.num_cores()
    values = {
        "home": home.expanduser().resolve(),
        "here": HERE,
        "python": sys.executable,
        "num_cores": cores,
        "cores": f"0-{cores - 1}",
    }
    commands = {}
    for name, entry in table.items():
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        commands[name] = ServerCommand(name=name, **fields).filled(**values)
    return commands


def compare(
    ours: ServerCommand,
    peer: ServerCommand,
    chosen: Sequence[loads.NamedLoad],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All rounds of ours against one peer. Raises ServerFailed."""
    log_folder = options.out / "logs"
    first, second = (command.filled(port=free_port()) for command in (ours, peer))
    runs: list[dict[str, Any]] = []
    with RunningServer(first, _port_of(first), log_folder) as a:
        loads.warm_up(a, seed=1)
        a.freeze()
        with RunningServer(second, _port_of(second), log_folder) as b:
            loads.warm_up(b, seed=1)
            b.freeze()
            for number in range(options.rounds):
                rates = machine.measure_rates()
                print(f"{peer.name}, round {number + 1}: {rates}", flush=True)
                seed = time.time_ns() % 2**31
                for load in chosen:
                    for server in (a, b) if number % 2 == 0 else (b, a):
                        side = "ours" if server is a else "peer"
                        rate = _rate(load, runs)
                        server.thaw()
                        summary = loads.run(server, load, seed, rate).summary
                        server.freeze()
                        runs.append(
                            _row(number, load, side, summary) | {"rate": rate, **rates.as_dict()}
                        )
                        print(_line(server.command.name, runs[-1]), flush=True)
    return {"peer": peer.name, "note": peer.note, "runs": runs}


def _port_of(command: ServerCommand) -> int:
    """The port that was filled in: the argument after --port."""
    return int(command.command[command.command.index("--port") + 1])


def _rate(load: loads.NamedLoad, runs: Iterable[dict[str, Any]]) -> float | None:
    """Requests a second for a load whose rate follows from what we reached on another."""
    if load.rate_of is None:
        return None
    name, share = load.rate_of
    reached = [
        row["requests_per_s"] for row in runs if (row["load"], row["side"]) == (name, "ours")
    ]
    if not reached:
        raise SystemExit(f"load {load.name} needs load {name} before it")
    return share * statistics.median(reached)


def _row(number: int, load: loads.NamedLoad, side: str, summary: Summary) -> dict[str, Any]:
    ttft, tpot, itl = summary.ttft_ms, summary.tpot_ms, summary.itl_ms
    return {
        "round": number,
        "load": load.name,
        "side": side,
        "failed": summary.failed,
        "errors": summary.errors,
        "output_tokens": summary.output_tokens,
        "wrong_length": summary.wrong_length,
        "counted_by": summary.counted_by,
        "duration_s": summary.duration_s,
        "requests_per_s": summary.requests_per_s,
        "tokens_per_s": summary.output_tokens_per_s,
        "ttft_p50": ttft.p50 if ttft else None,
        "ttft_p99": ttft.p99 if ttft else None,
        "tpot_p50": tpot.p50 if tpot else None,
        "itl_p99": itl.p99 if itl else None,
        "client_cpu_s": summary.client_cpu_s,
    }


def _line(name: str, row: dict[str, Any]) -> str:
    figures = {
        "tok/s": row["tokens_per_s"],
        "TTFT p50": row["ttft_p50"],
        "p99": row["ttft_p99"],
        "TPOT": row["tpot_p50"],
    }
    shown = "  ".join(f"{k} {v:8.1f}" for k, v in figures.items() if v is not None)
    trouble = f"  {row['failed']} FAILED {row['errors']}" if row["failed"] else ""
    return f"  {row['load']:>8} {name:<18} {shown}{trouble}"


def ratios(runs: Sequence[dict[str, Any]], load: str, figure: str) -> list[float]:
    """Ours to peer's by round; latencies the other way round, so that above 1 is our advantage."""
    found = []
    for number in sorted({row["round"] for row in runs}):
        pair = {r["side"]: r[figure] for r in runs if (r["round"], r["load"]) == (number, load)}
        ours, peer = pair.get("ours"), pair.get("peer")
        if ours and peer:
            found.append(ours / peer if figure == "tokens_per_s" else peer / ours)
    return found


def markdown(report: dict[str, Any]) -> str:
    """The table of ratios, with medians of the absolute figures."""
    about = report["machine"]
    lines = [
        f"`{report['command']}`, {about['date']}, {about['cpu']}, {about['cores']} cores.",
        "",
        f"Ratios of `{report['ours']}` to each peer in neighbouring runs: median [least – greatest]"
        " of the rounds; above 1 is better for us, for latencies too.",
        "",
        "| peer | load | tok/s ours | tok/s peer | throughput | TTFT p50 | TTFT p99 | TPOT p50 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for pair in report["pairs"]:
        runs = pair["runs"]
        for load in dict.fromkeys(row["load"] for row in runs):
            cells = [_median(runs, load, side, "tokens_per_s") for side in ("ours", "peer")]
            cells += [
                _spread(ratios(runs, load, figure))
                for figure in ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50")
            ]
            lines.append(f"| {pair['peer']} | {load} | " + " | ".join(cells) + " |")
    notes = [f"- {pair['peer']}: {pair['note']}" for pair in report["pairs"] if pair["note"]]
    skipped = [f"- {name}: skipped, {_in_a_line(why)}" for name, why in report["skipped"].items()]
    about_loads = [f"- load {load.name}: {load.about}" for load in loads.ALL_LOADS]
    return "\n".join([*lines, "", *notes, *skipped, *about_loads, ""])


def _in_a_line(why: str) -> str:
    """A reason and, of a log that follows it, the last line."""
    first, *others = why.splitlines()
    return f"{first} {others[-1].strip()}" if others else first


def _median(runs: Sequence[dict[str, Any]], load: str, side: str, figure: str) -> str:
    values = [row[figure] for row in runs if (row["load"], row["side"]) == (load, side)]
    return f"{statistics.median(values):.0f}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.2f} [{min(values):.2f} – {max(values):.2f}]"


if __name__ == "__main__":
    sys.exit(main())
