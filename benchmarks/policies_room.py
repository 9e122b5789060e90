"""Policies for when the pool is too small: how to preempt, whom, and how to do it seldom."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from matplotlib.axes import Axes

from benchmarks.policies_simulated import Comparison, latency, run
from serve.simulate.figures import Figures
from serve.simulate.report import duration
from serve.simulate.settings import MachineConfig
from serve.simulate.workload import Synthetic, draw

MODES = ("recompute", "swap", "auto")


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
    totals: dict[tuple[str, str], list[Figures]] = {}
    for load in VICTIM_LOADS:
        for seed in range(3):
            requests = draw(replace(load, seed=seed))
            for victim in VICTIMS:
                for mode in ("recompute", "swap"):
                    figures = run(
                        requests,
                        MachineConfig(),
                        num_blocks=2500,
                        preemption_mode=mode,
                        preemption_victim=victim,
                    )
                    totals.setdefault((victim, mode), []).append(figures)
    rows = [
        (
            victim,
            mode,
            f"{fmean(f.output_tokens_per_s for f in figures):,.0f}",
            duration(fmean(f.ttft.p99 for f in figures if f.ttft)),
            duration(fmean(f.tpot.p99 for f in figures if f.tpot)),
            duration(fmean(f.itl.max for f in figures if f.itl)),
            str(sum(f.preemptions_recompute + f.preemptions_swap for f in figures)),
            str(max(f.max_preemptions for f in figures)),
            f"{sum(f.tokens_recomputed for f in figures):,}",
            f"{sum(f.blocks_swapped for f in figures):,}",
        )
        for (victim, mode), figures in totals.items()
    ]

    def draw_bars(axes: list[Axes]) -> None:
        for plot, mode in zip(axes, ("recompute", "swap"), strict=True):
            speed = [fmean(f.output_tokens_per_s for f in totals[v, mode]) for v in VICTIMS]
            plot.bar(VICTIMS, [100 * (value / speed[0] - 1) for value in speed])
            plot.set_title(f"by {mode}")
            plot.set_ylabel("tokens/s, % more than last-admitted")
            plot.tick_params(axis="x", rotation=15)

    return Comparison(
        "victims",
        "Who gives way",
        "Means and sums over three loads (mixed, short and long requests) with three seeds each, "
        "over a pool that is too small. Throughput is the same within 1 %, so the default is "
        "last-admitted, which takes nothing from the elder; least-progress computes again only "
        "half as much.",
        (
            *("victim", "mode", "tokens/s", "TTFT p99", "TPOT p99", "longest gap", "preemptions"),
            *("most of one", "tokens recomputed", "blocks copied"),
        ),
        rows,
        2,
        draw_bars,
    )


VICTIMS = ("last-admitted", "least-progress", "most-blocks", "cheapest")
VICTIM_LOADS = (
    Synthetic(
        num_requests=300,
        rate=12.0,
        prompt_len="128@0.8+4096@0.2",
        output_len="uniform:50:800",
    ),
    Synthetic(
        num_requests=400, rate=30.0, prompt_len="uniform:50:300", output_len="uniform:50:800"
    ),
    Synthetic(
        num_requests=120, rate=4.0, prompt_len="uniform:500:8000", output_len="uniform:50:900"
    ),
)


def thrash_guard() -> Comparison:
    """What is gained by leaving blocks free at admission."""
    loads = {
        "long answers": Synthetic(
            num_requests=400, rate=20.0, prompt_len="uniform:50:300", output_len="uniform:400:1200"
        ),
        "mixed": VICTIM_LOADS[0],
        "long prompts": VICTIM_LOADS[2],
    }
    rows, bars = [], {}
    for name, load in loads.items():
        requests = draw(load)
        for mode in ("recompute", "swap"):
            for guard in (True, False):
                figures = run(
                    requests,
                    MachineConfig(),
                    num_blocks=1500,
                    preemption_mode=mode,
                    thrash_guard=guard,
                )
                bars[name, mode, guard] = figures
                rows.append(
                    (
                        name,
                        mode,
                        "on" if guard else "off",
                        f"{figures.output_tokens_per_s:,.0f}",
                        latency(figures, "ttft", "p99"),
                        latency(figures, "tpot", "p99"),
                        latency(figures, "itl", "max"),
                        str(figures.preemptions_recompute + figures.preemptions_swap),
                        str(figures.max_preemptions),
                        f"{figures.tokens_recomputed:,}",
                        f"{figures.blocks_swapped:,}",
                    )
                )

    def draw_bars(axes: list[Axes]) -> None:
        for plot, mode in zip(axes, ("recompute", "swap"), strict=True):
            for offset, guard in enumerate((True, False)):
                counts = [
                    bars[x, mode, guard].preemptions_recompute
                    + bars[x, mode, guard].preemptions_swap
                    for x in loads
                ]
                places = [i + 0.35 * offset for i in range(len(loads))]
                plot.bar(places, counts, 0.35, label="guard on" if guard else "guard off")
            plot.set_xticks([i + 0.17 for i in range(len(loads))], list(loads))
            plot.set_title(f"by {mode}")
            plot.set_ylabel("preemptions")
        axes[0].legend()

    return Comparison(
        "guard",
        "The guard against thrashing",
        "Leaving blocks free at admission, more after preemptions, against letting in whatever "
        "fits (--no-thrash-guard).",
        (
            *("load", "mode", "guard", "tokens/s", "TTFT p99", "TPOT p99", "longest gap"),
            *("preemptions", "most of one", "tokens recomputed", "blocks copied"),
        ),
        rows,
        2,
        draw_bars,
    )
