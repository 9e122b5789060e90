"""`python -m benchmarks.front_load`: what the HTTP front costs per streamed token.

Many concurrent streams over loopback, one chunk per token, once from our front over an engine that
costs nothing and once from a bare Starlette app (`benchmarks.front_server`). The servers run in a
process of their own; the client, in this one, only counts bytes. Ratios within one run count.
Writes results/front_load.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.front_server import CHUNK

NAMES = {"ours": "serve-llm's front", "bare": "bare Starlette"}
WORD = CHUNK.partition(b'"content":')[2].partition(b"}")[0]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one server's run."""

    tokens_per_s: float
    cpu_us: float  # of the server's process, per token

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.0f} tokens/s, {self.cpu_us:.1f} µs CPU per token"


def main() -> None:
    """Measure both by turns, print each run, and write medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    runs: dict[str, list[Figures]] = {name: [] for name in NAMES}
    for _ in range(options.rounds):
        for name, figures in runs.items():
            figures.append(run(name, options.streams, options.tokens))
            print(f"{NAMES[name]}: {figures[-1]}", flush=True)
    text = report(runs, options.streams, options.tokens)
    (options.out / "front_load.md").write_text(text, encoding="utf-8")
    print(text)


def run(name: str, streams: int, tokens: int) -> Figures:
    """One server's figures. Raises RuntimeError unless every stream is whole."""
    command = [sys.executable, "-m", "benchmarks.front_server", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            process = psutil.Process(server.pid)
            uvloop.run(read_all(port, streams, 2))  # what is made once is made now
            cpu_before, began = process.cpu_times(), time.perf_counter()
            uvloop.run(read_all(port, streams, tokens))
            wall_s, cpu_after = time.perf_counter() - began, process.cpu_times()
        finally:
            server.terminate()
    cpu_s = cpu_after.user + cpu_after.system - cpu_before.user - cpu_before.system
    return Figures(streams * tokens / wall_s, cpu_s * 1e6 / (streams * tokens))


def report(runs: dict[str, list[Figures]], streams: int, tokens: int) -> str:
    """Medians and ratios as Markdown."""
    rate = {name: statistics.median(f.tokens_per_s for f in runs[name]) for name in runs}
    cpu = {name: statistics.median(f.cpu_us for f in runs[name]) for name in runs}
    from benchmarks.machine import describe  # imports torch

    machine = describe()
    rows = [f"| {NAMES[name]} | {rate[name]:,.0f} | {cpu[name]:.1f} |" for name in runs]
    return "\n".join(
        [
            "# What the HTTP front costs per streamed token",
            "",
            f"`python -m benchmarks.front_load --streams {streams} --tokens {tokens} "
            f"--rounds {len(runs['ours'])}`",
            "",
            f"{streams} concurrent streams of {tokens} tokens over loopback, one chunk per token; "
            f"medians of {len(runs['ours'])} rounds, the servers by turns. The engine costs "
            "nothing, so this is the front alone: decoding the engine's steps, detokenizing, "
            "JSON, HTTP. The client uses a core of its own.",
            "",
            f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, "
            f"{machine['date']}.",
            "",
            "| server | tokens/s | CPU of the server, µs per token |",
            "|---|---|---|",
            *rows,
            f"| ratio | {rate['ours'] / rate['bare']:.2f} | {cpu['ours'] / cpu['bare']:.2f} |",
            "",
        ]
    )


async def read_all(port: int, streams: int, tokens: int) -> None:
    """All streams at once."""
    counts = await asyncio.gather(*(read_one(port, tokens) for _ in range(streams)))
    if set(counts) != {tokens}:
        raise RuntimeError(f"streams of {sorted(set(counts))} tokens instead of {tokens}")


async def read_one(port: int, tokens: int) -> int:
    """One stream; how many chunks carry text."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"content-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    answer = await reader.read()
    writer.close()
    return answer.count(b'"content":' + WORD)


if __name__ == "__main__":
    main()
