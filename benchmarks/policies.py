"""What each policy of the scheduler is good for, in numbers.

    python -m benchmarks.policies

The real scheduler and cache in `serve-llm simulate`'s virtual time, over its default costs (an
8-billion-parameter model on a large GPU: calculated, not measured). So the numbers depend on
nothing but this repository, and tell policies apart, not machines. Writes results/policies.md and
one plot per comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.axes import Axes

from serve.bench.plot import new_figure
from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.simulate.figures import Figures, Targets, figures_of, spread
from serve.simulate.report import duration
from serve.simulate.settings import MachineConfig
from serve.simulate.simulation import Outcome, simulate
from serve.simulate.workload import SimRequest, Synthetic, draw

TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)
TARGET_ITL_MS = 30.0
MODES = ("recompute", "swap", "auto")
Row = tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """A table, and what to draw of it."""

    name: str
    title: str
    reading: str
    header: Row
    rows: list[Row]
    num_plots: int
    draw: Callable[[list[Axes]], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = ["# Policies of the scheduler, compared in virtual time\n"]
    parts.append("Made by `python -m benchmarks.policies`; costs are simulate's defaults.\n")
    for compare in (preemption_modes, victims, step_policies, service_orders):
        comparison = compare()
        parts.append(as_markdown(comparison))
        print(parts[-1])
        figure, axes = new_figure(1, comparison.num_plots, (9, 4))
        comparison.draw(axes)
        figure.savefig(options.out / f"policies-{comparison.name}.png", dpi=120)
    (options.out / "policies.md").write_text("\n".join(parts), encoding="utf-8")


# ---------------------------------------------------------------------------- preemption


def preemption_modes() -> Comparison:
    """Swap or recompute, for short and long prompts, over a fast and a slow link, and with the
    prefix cache (off otherwise, so that what is lost is lost)."""
    loads = {"prompts of 256": (256, 400, 300, 2000), "prompts of 8192": (8192, 1500, 40, 3000)}
    situations = {"25 GB/s": (25.0, False), "2 GB/s": (2.0, False), "25 GB/s, cache": (25.0, True)}
    rows, lost = [], {}
    for load, (prompt_len, output_len, num_requests, num_blocks) in loads.items():
        requests = draw(
            Synthetic(
                num_requests=num_requests,
                rate=0.0,
                prompt_len=str(prompt_len),
                output_len=str(output_len),
            )
        )
        for situation, (gb_per_s, caching) in situations.items():
            for mode in MODES:
                machine = MachineConfig(swap_gb_per_s=gb_per_s)
                figures = run(
                    requests,
                    machine,
                    num_blocks=num_blocks,
                    caching=caching,
                    preemption_mode=mode,
                )
                lost[load, situation, mode] = figures.duration_s
                rows.append(
                    (
                        load,
                        situation,
                        mode,
                        f"{figures.output_tokens_per_s:,.0f}",
                        latency(figures, "tpot", "p99"),
                        latency(figures, "itl", "max"),
                        f"{figures.preemptions_recompute} / {figures.preemptions_swap}",
                        f"{figures.tokens_recomputed:,}",
                        f"{figures.blocks_swapped:,}",
                    )
                )

    def draw_bars(axes: list[Axes]) -> None:
        for plot, load in zip(axes, loads, strict=True):
            fastest = {x: min(lost[load, x, mode] for mode in MODES) for x in situations}
            for offset, mode in enumerate(MODES):
                values = [lost[load, x, mode] - fastest[x] for x in situations]
                places = [i + 0.25 * offset for i in range(len(situations))]
                plot.bar(places, values, 0.25, label=mode)
            plot.set_xticks([i + 0.25 for i in range(len(situations))], list(situations))
            plot.set_title(load)
            plot.set_ylabel("seconds longer than the fastest")
        axes[0].legend()

    return Comparison(
        "preemption",
        "Swap, recompute or whichever is cheaper",
        "All requests come at once and outgrow the pool. auto measures both costs as it runs. With "
        "the prefix cache, much of what recomputing lost is found there again.",
        (
            *("load", "copies at", "mode", "tokens/s", "TPOT p99", "longest gap"),
            *("recompute / swap", "tokens recomputed", "blocks copied"),
        ),
        rows,
        len(loads),
        draw_bars,
    )


def victims() -> Comparison:
    """Who gives way, when requests differ much in length."""
    requests = draw(
        Synthetic(
            num_requests=300,
            rate=12.0,
            prompt_len="128@0.8+4096@0.2",
            output_len="uniform:50:800",
        )
    )
    rows, bars = [], {}
    for victim in ("last-admitted", "least-progress", "most-blocks", "cheapest"):
        for mode in ("recompute", "swap"):
            figures = run(
                requests,
                MachineConfig(),
                num_blocks=2500,
                preemption_mode=mode,
                preemption_victim=victim,
            )
            bars[victim, mode] = figures
            rows.append(
                (
                    victim,
                    mode,
                    f"{figures.output_tokens_per_s:,.0f}",
                    latency(figures, "ttft", "p99"),
                    latency(figures, "tpot", "p99"),
                    f"{figures.preemptions_recompute + figures.preemptions_swap}",
                    str(figures.max_preemptions),
                    f"{figures.tokens_recomputed:,}",
                    f"{figures.blocks_swapped:,}",
                )
            )

    def draw_bars(axes: list[Axes]) -> None:
        (plot,) = axes
        names = [victim for victim, mode in bars if mode == "recompute"]
        plot.bar(names, [bars[name, "recompute"].tokens_recomputed for name in names])
        plot.set_ylabel("tokens recomputed")

    return Comparison(
        "victims",
        "Who gives way",
        "Mixed lengths over a pool that is too small.",
        (
            *("victim", "mode", "tokens/s", "TTFT p99", "TPOT p99", "preemptions"),
            *("most of one", "tokens recomputed", "blocks copied"),
        ),
        rows,
        1,
        draw_bars,
    )


# ---------------------------------------------------------------------------- within a step


def step_policies() -> Comparison:
    """Chats that stream, and now and then a very long prompt."""
    requests = mixed_load()
    policies: dict[str, dict[str, Any]] = {
        "chunked, 8192 tokens": {},
        "chunked, 2048 tokens": {"max_num_batched_tokens": 2048},
        "chunked, 512 tokens": {"max_num_batched_tokens": 512},
        f"adaptive, {TARGET_ITL_MS:g} ms": {"target_itl_ms": TARGET_ITL_MS},
        "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 32_768},
        "prefill first": {"step_order": "prefill-first", "max_num_batched_tokens": 32_768},
    }
    rows, gaps = [], {}
    for name, settings in policies.items():
        outcome = outcome_of(requests, MachineConfig(), num_blocks=20_000, **settings)
        figures = figures_of(outcome, TARGETS)
        gaps[name] = inter_token_gaps(outcome)
        rows.append(
            (
                name,
                latency(figures, "itl", "p50"),
                latency(figures, "itl", "p99"),
                latency(figures, "itl", "max"),
                duration(longest_gap(outcome)),
                latency(figures, "ttft", "p50"),
                latency(figures, "ttft", "p99"),
                f"{figures.output_tokens_per_s:,.0f}",
            )
        )

    def draw_curves(axes: list[Axes]) -> None:
        (plot,) = axes
        for name, points in gaps.items():
            plot.loglog(
                [1e3 * gap for gap, _ in points], [share for _, share in points], label=name
            )
        plot.axvline(TARGET_ITL_MS, color="grey", linestyle=":")
        plot.set_xlabel("gap between tokens, ms")
        plot.set_ylabel("share of gaps that are longer")
        plot.legend()

    return Comparison(
        "steps",
        "What a step is filled with",
        "Six short chats a second, and every 2.5 s a prompt of 16,000 to 24,000 tokens. The "
        "longest gap is that of each request; p50 is over requests.",
        (
            "policy",
            "ITL p50",
            "ITL p99",
            "ITL max",
            "longest gap, p50",
            "TTFT p50",
            "TTFT p99",
            "tokens/s",
        ),
        rows,
        1,
        draw_curves,
    )


def mixed_load() -> list[SimRequest]:
    """See `step_policies`."""
    chats = draw(
        Synthetic(num_requests=360, rate=6.0, prompt_len="lognormal:300:0.6", output_len="200")
    )
    rng = Random(7)
    documents = [
        SimRequest(2.5 * i, ((10_000 + i, rng.randint(16_000, 24_000)),), 100) for i in range(1, 24)
    ]
    return sorted([*chats, *documents], key=lambda request: request.arrival_s)


# ---------------------------------------------------------------------------- order of service


def service_orders() -> Comparison:
    """One client who sends everything at once, and one who now and then asks something."""
    requests = tenants()
    rows, curves = [], {}
    for policy in ("fcfs", "priority", "fair"):
        outcome = outcome_of(
            requests, MachineConfig(), num_blocks=4000, max_num_seqs=16, scheduling_policy=policy
        )
        for user in ("greedy", "modest"):
            waits = [h.ttft_s for h in outcome.histories if h.request.user == user]
            found = spread(waits)
            assert found is not None
            curves[policy, user] = sorted(waits)
            own = [h.token_times[-1] for h in outcome.histories if h.request.user == user]
            row = (policy, user, duration(found.p50), duration(found.p99), duration(max(own)))
            rows.append(row)

    def draw_curves(axes: list[Axes]) -> None:
        (plot,) = axes
        for (policy, user), waits in curves.items():
            share = [(i + 1) / len(waits) for i in range(len(waits))]
            style = "-" if user == "modest" else ":"
            plot.semilogx(waits, share, style, label=f"{policy}, {user} client")
        plot.set_xlabel("time to first token, s")
        plot.set_ylabel("share of requests")
        plot.legend()

    return Comparison(
        "order",
        "Who is served first",
        "One client sends 300 requests at once; another sends one every 0.5 s (with priority -1, "
        "which only the priority policy looks at). 16 requests run at a time.",
        ("policy", "client", "TTFT p50", "TTFT p99", "its last token after"),
        rows,
        1,
        draw_curves,
    )


def tenants() -> list[SimRequest]:
    """See `service_orders`."""
    greedy = [SimRequest(0.0, ((i, 400),), 200, user="greedy") for i in range(300)]
    modest = [
        SimRequest(0.5 * i, ((1000 + i, 200),), 100, priority=-1, user="modest") for i in range(60)
    ]
    return sorted([*greedy, *modest], key=lambda request: request.arrival_s)


# ---------------------------------------------------------------------------- running, showing


def run(requests: Sequence[SimRequest], machine: MachineConfig, **settings: Any) -> Figures:
    """The figures of one simulation."""
    return figures_of(outcome_of(requests, machine, **settings), TARGETS)


def outcome_of(
    requests: Sequence[SimRequest],
    machine: MachineConfig,
    *,
    num_blocks: int,
    caching: bool = True,
    **settings: Any,
) -> Outcome:
    """One simulation. Every request must have been answered."""
    engine = EngineConfig(
        cache=CacheConfig(
            num_gpu_blocks_override=num_blocks, swap_space=16.0, enable_prefix_caching=caching
        ),
        scheduler=SchedulerConfig(**settings),
    )
    block_size = engine.cache.block_size
    outcome = simulate(requests, engine, machine.sizes(engine), machine.cost(block_size))
    assert all(history.refusal is None for history in outcome.histories), settings
    return outcome


def longest_gap(outcome: Outcome) -> float:
    """Median over requests of the longest gap between two tokens."""
    found = spread([max(b - a for a, b in pairwise(h.token_times)) for h in outcome.histories])
    assert found is not None
    return found.p50


def inter_token_gaps(outcome: Outcome) -> list[tuple[float, float]]:
    """Gaps between tokens, shortest first, each with the share that are longer; of the shorter
    ones only some, which is enough for drawing."""
    gaps = sorted(b - a for h in outcome.histories for a, b in pairwise(h.token_times))
    kept = [*range(0, len(gaps) - 1000, 50), *range(max(0, len(gaps) - 1000), len(gaps))]
    return [(gaps[i], 1 - i / len(gaps)) for i in kept]


def latency(figures: Figures, name: str, quantile: str) -> str:
    return duration(getattr(getattr(figures, name), quantile))


def as_markdown(comparison: Comparison) -> str:
    """A section with its table and its plot."""
    lines = [f"## {comparison.title}\n", f"{comparison.reading}\n"]
    lines.append("| " + " | ".join(comparison.header) + " |")
    lines.append("|" + "---|" * len(comparison.header))
    lines += ["| " + " | ".join(row) + " |" for row in comparison.rows]
    lines.append(f"\n![{comparison.title}](policies-{comparison.name}.png)\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
