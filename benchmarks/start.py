"""How long a warm start takes to the first token of a completion, as a multiple of `import torch`.

    python -m benchmarks.start [--rounds 5] [-- FLAGS OF serve-llm serve]

Each round imports torch in a process of its own, then starts a server, asks it for one token as
soon as it listens, and ends it. Both halves of a round meet the same load of the machine, so their
ratio means more than their seconds; the seconds of CPU of all processes are told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine

_ADDRESS = re.compile(r"serving (\S+) at (http://\S+)")
_TIME_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds on the clock, and of CPU in the process and its children."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """`import torch`, and a start to the first token, one after the other."""

    torch: Cost
    start: Cost


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("flags", nargs="*", help="of serve-llm serve, after --")
    options = parser.parse_args()

    _measured(lambda: _start(options.flags))  # fills the caches: only warm starts count
    rounds = []
    for number in range(options.rounds):
        rounds.append(Round(_measured(_import_torch), _measured(lambda: _start(options.flags))))
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr)
    text = as_markdown(rounds, options.flags)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "start.md").write_text(text, encoding="utf-8")


def _import_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def _start(flags: Sequence[str]) -> float:
    """Seconds to the first token. Raises RuntimeError with the log of a server that did not come
    up."""
    command = [sys.executable, "-m", "serve.cli", "serve", "--port", "0", *flags]
    started = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        model, address = _wait_for_address(server)
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 1}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIME_LIMIT_S) as answer:
            answer.read()
        return time.perf_counter() - started
    finally:
        server.terminate()
        server.communicate(timeout=_TIME_LIMIT_S)


def _wait_for_address(server: subprocess.Popen[str]) -> tuple[str, str]:
    assert server.stderr is not None
    log = []
    for line in server.stderr:
        log.append(line)
        if found := _ADDRESS.search(line):
            return found[1], found[2]
    raise RuntimeError("the server did not start:\n" + "".join(log))


def _measured(run: Callable[[], float]) -> Cost:
    """What `run` returns, and the CPU time of the processes that it started and that ended."""
    before = os.times()
    wall_s = run()
    after = os.times()
    used = after.children_user - before.children_user
    return Cost(wall_s, used + after.children_system - before.children_system)


def as_markdown(rounds: Sequence[Round], flags: Sequence[str]) -> str:
    """The result file."""
    wall = [r.start.wall_s / r.torch.wall_s for r in rounds]
    cpu = [r.start.cpu_s / r.torch.cpu_s for r in rounds]
    described = ", ".join(f"{name} {value}" for name, value in machine.describe().items())
    lines = [
        "# Start: to the first token of a completion, warm",
        "",
        f"{described}; load average {os.getloadavg()[0]:.1f}. "
        f"`serve-llm serve {' '.join(flags)}`".rstrip(" `")
        + "`, made by "
        "`python -m benchmarks.start`.",
        "",
        "| round | import torch, s | CPU, s | start to first token, s | CPU, s | ratio |",
        "|---|---|---|---|---|---|",
        *(
            f"| {i} | {r.torch.wall_s:.2f} | {r.torch.cpu_s:.2f} | {r.start.wall_s:.2f} | "
            f"{r.start.cpu_s:.2f} | {r.start.wall_s / r.torch.wall_s:.2f} |"
            for i, r in enumerate(rounds, 1)
        ),
        "",
        f"Median ratio {statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f}); of CPU "
        f"time, all processes and their end together, {statistics.median(cpu):.2f} "
        f"({min(cpu):.2f} to {max(cpu):.2f}).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
