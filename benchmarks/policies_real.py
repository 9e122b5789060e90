"""A few of the comparisons of `benchmarks.policies`, with the real default model on this machine.

    python -m benchmarks.policies_real [--model FILE]

Steps take the time they take, so figures differ between runs and machines; what costs more than
what should not. Writes results/policies_real.md and a plot.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import machine
from serve.bench.plot import new_figure
from serve.checkpoint.hub import find_model
from serve.config import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from serve.engine.build import build_engine_core
from serve.messages import AddRequest, FromEngine, ToEngine
from serve.sampling_params import SamplingParams

NUM_CHATS = 4
CHAT_TOKENS = 80
DOCUMENT_TOKENS = 500
TOKENS_BETWEEN_DOCUMENTS = 10
TARGET_GAPS = 6
LONG_TOKENS, LONG_BUDGET = 1600, 32
ORDERS = {"strict order": False, "short ones pass": True}
ROUNDS = 3
MODES = ("recompute", "swap", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.policies_real", description=__doc__)
    parser.add_argument("--model", help="default: the model that serve-llm serves by itself")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    path = find_model(options.model, None)
    parts = ["# Policies of the scheduler, with a real model\n"]
    parts.append(f"Made by `python -m benchmarks.policies_real` with {path.name}.\n")
    gaps, text = step_policies(path)
    parts += [text, prefill_orders(path), preemption_modes(path)]
    told = [f"{name}: {value}" for name, value in machine.describe().items()]
    parts.append("; ".join(told) + ".\n")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "policies_real.md").write_text("\n".join(parts), encoding="utf-8")
    draw_gaps(gaps, options.out / "policies_real-steps.png")
    print("\n".join(parts))


# ---------------------------------------------------------------------------- within a step


def step_policies(path: Path) -> tuple[dict[str, list[float]], str]:
    """Chats that stream while long prompts come in; gaps between the chats' tokens, by policy."""
    chunked = chat_gaps(path)
    target_ms = round(1000 * TARGET_GAPS * statistics.median(chunked))
    gaps = {
        "chunked, 2048 tokens": chunked,
        f"adaptive, {target_ms} ms": chat_gaps(path, target_itl_ms=float(target_ms)),
        "whole prompts": chat_gaps(path, enable_chunked_prefill=False, max_num_batched_tokens=8192),
    }
    rows = []
    for name, found in gaps.items():
        p50, p99 = (1e3 * quantile(found, share) for share in (0.5, 0.99))
        rows.append(
            [name, f"{p50:.0f} ms", f"{p99:.0f} ms", f"{p99 / target_ms:.2f} x", str(len(found))]
        )
    text = [
        "## What a step is filled with\n",
        f"{NUM_CHATS} chats stream; after every {TOKENS_BETWEEN_DOCUMENTS} tokens of the first a "
        f"prompt of {DOCUMENT_TOKENS} tokens comes in. The target is {TARGET_GAPS} times the "
        "median gap: the 16 prompt tokens that a step has at least take three of them here.\n",
        *table(["policy", "ITL p50", "ITL p99", "to the target", "gaps"], rows),
        "\n![Inter-token gaps](policies_real-steps.png)\n",
    ]
    return gaps, "\n".join(text)


def chat_gaps(path: Path, **settings: Any) -> list[float]:
    """Seconds between the chats' tokens."""
    rng = Random(1)
    with Bench(path, num_blocks=600, **settings) as bench:
        bench.warm_up()
        for number in range(NUM_CHATS):
            bench.add(f"chat{number}", prompt(rng, 40), CHAT_TOKENS)
        num_sent = 0
        while len(times := bench.times.get("chat0", [])) < CHAT_TOKENS:
            if len(times) > num_sent * TOKENS_BETWEEN_DOCUMENTS + 5:
                num_sent += 1
                bench.add(f"document{num_sent}", prompt(rng, DOCUMENT_TOKENS), 2)
            bench.step()
        chats = [bench.times[f"chat{number}"] for number in range(NUM_CHATS)]
        return [b - a for times in chats for a, b in pairwise(times)]


def draw_gaps(gaps: dict[str, list[float]], path: Path) -> None:
    figure, (plot,) = new_figure(1, 1, (9, 4))
    for name, found in gaps.items():
        ordered = sorted(1e3 * gap for gap in found)
        plot.loglog(ordered, [1 - i / len(ordered) for i in range(len(ordered))], label=name)
    plot.set_xlabel("gap between tokens, ms")
    plot.set_ylabel("share of gaps that are longer")
    plot.legend()
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------- behind a long prompt


def prefill_orders(path: Path) -> str:
    """A short prompt that comes when a long one has begun: its wait, and the other's cost."""
    kinds = [(order, short_len) for order in ORDERS for short_len in (0, 24, 60)]
    rounds = [
        {kind: behind_a_long_prompt(path, kind[1], fair_prefill=ORDERS[kind[0]]) for kind in kinds}
        for _ in range(ROUNDS)
    ]
    best = {
        kind: {what: min(r[kind][what] for r in rounds) for what in rounds[0][kind]}
        for kind in kinds
    }
    either = [best.pop((order, 0)) for order in ORDERS]
    alone = {what: min(found[what] for found in either) for what in either[0]}
    best = {("either", 0): alone, **best}
    rows = []
    for (order, short_len), found in best.items():
        row = [order, "nothing", "", "", ""]
        if short_len:
            share = f"{found['short'] / alone['left']:.2f}"
            row[1:3] = [f"one of {short_len}", f"{found['short']:.2f} s"]
            row[3:] = [share, f"{found['short steps']:.0f}"]
        ratio = f"{found['long'] / alone['long']:.2f} x"
        rows.append([*row, f"{found['long']:.2f} s", ratio, f"{found['long steps']:.0f}"])
    header = ["prompts", "what comes", "its TTFT", "share of what was left", "steps"]
    return "\n".join(
        [
            "## A short prompt behind a long one\n",
            f"A prompt of {LONG_TOKENS:,} tokens runs in steps of {LONG_BUDGET}; after five comes "
            "a short one, which asks for 20 tokens. What was left is the time until the long one's "
            "first token when nothing comes. Processor seconds of one thread, the least of "
            f"{ROUNDS} rounds in turn.\n",
            *table([*header, "long TTFT", "to nothing coming", "steps"], rows),
            "",
        ]
    )


def behind_a_long_prompt(path: Path, short_len: int, *, fair_prefill: bool) -> dict[str, float]:
    """Processor seconds and steps to the long prompt's first token, and to the short one's from
    when it comes; `left` is from there to the long one's."""
    rng = Random(3)
    settings = {"fair_prefill": fair_prefill, "max_num_batched_tokens": LONG_BUDGET}
    with Bench(path, 300, clock=time.process_time, num_threads=1, **settings) as bench:
        bench.warm_up()
        began, first_step = time.process_time(), bench.num_steps
        bench.add("long", prompt(rng, LONG_TOKENS), 2)
        for _ in range(5):
            bench.step()
        came = time.process_time()
        if short_len:
            bench.add("short", prompt(rng, short_len), 20)
        bench.run()
        long_s = bench.times["long"][0]
        return {
            "long": long_s - began,
            "long steps": bench.first_steps["long"] - first_step,
            "left": long_s - came,
            "short": bench.times.get("short", [came])[0] - came,
            "short steps": bench.first_steps.get("short", 0) - first_step - 5,
        }


# ---------------------------------------------------------------------------- preemption


def preemption_modes(path: Path) -> str:
    """Time to answer everything, when it does not fit at once."""
    loads = {"8 prompts of 60, 90 more": (8, 60, 90), "3 prompts of 450, 60 more": (3, 450, 60)}
    rows = []
    for load, (num_requests, prompt_len, output_len) in loads.items():
        for mode in MODES:
            rng = Random(2)
            num_blocks = num_requests * (prompt_len + output_len) * 2 // 3 // 16
            with Bench(path, num_blocks, caching=False, preemption_mode=mode) as bench:
                bench.warm_up()
                began = time.perf_counter()
                for number in range(num_requests):
                    bench.add(f"r{number}", prompt(rng, prompt_len), output_len)
                bench.run()
                seconds = time.perf_counter() - began
                stats = bench.core.scheduler.stats()
            preemptions = f"{stats.total_preemptions_recompute} / {stats.total_preemptions_swap}"
            lost = f"{stats.total_preemption_tokens_recomputed:,}"
            copied = f"{stats.total_preemption_blocks_swapped:,}"
            rows.append([load, mode, f"{seconds:.1f} s", preemptions, lost, copied])
    header = ["load", "mode", "all answered after", "recompute / swap", "tokens recomputed"]
    return "\n".join(
        [
            "## Swap, recompute or whichever is cheaper\n",
            "All requests come at once; the pool holds two thirds of what they need. The prefix "
            "cache is off, so that what is lost is lost.\n",
            *table([*header, "blocks copied"], rows),
            "",
        ]
    )


# ---------------------------------------------------------------------------- an engine


class Bench:
    """The real engine core in this process, and when each request's tokens were known."""

    def __init__(
        self,
        path: Path,
        num_blocks: int,
        *,
        caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        num_threads: int | None = None,
        **settings: Any,
    ) -> None:
        self._clock = clock
        self.times: dict[str, list[float]] = {}
        self.first_steps: dict[str, int] = {}
        self.num_steps = 0
        config = EngineConfig(
            cache=CacheConfig(
                num_gpu_blocks_override=num_blocks,
                swap_space=0.5,
                enable_prefix_caching=caching,
            ),
            scheduler=SchedulerConfig(max_num_seqs=16, **settings),
            device=DeviceConfig(device="cpu", cpu_threads=num_threads),
        )
        self.core, _ = build_engine_core(config, path, _Nowhere(), _Nowhere())

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *failure: object) -> None:
        self.core.close()

    def warm_up(self) -> None:
        """Touch the memory and measure what steps cost."""
        for number in range(3):
            self.add(f"warm{number}", prompt(Random(number), 120), 4)
        self.run()

    def add(self, name: str, token_ids: Sequence[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.core.handle(AddRequest(name, list(token_ids), sampling, time.monotonic()))

    def step(self) -> None:
        deltas = self.core.step()
        self.num_steps += 1
        now = self._clock()
        for delta in deltas:
            assert delta.error is None, delta.error
            if delta.token_ids:
                self.times.setdefault(delta.request_id, []).append(now)
                self.first_steps.setdefault(delta.request_id, self.num_steps)

    def run(self) -> None:
        while self.core.has_work():
            self.step()


class _Nowhere:
    """The core's mail, unused."""

    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        pass


def prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(length)]


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    main()
