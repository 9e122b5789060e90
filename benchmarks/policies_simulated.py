"""What the comparisons of `benchmarks.policies` are made of: simulations, figures and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.simulate.figures import Figures, Targets, figures_of
from serve.simulate.report import duration
from serve.simulate.settings import MachineConfig
from serve.simulate.simulation import Outcome, simulate
from serve.simulate.workload import SimRequest

TARGETS = Targets(ttft_s=2.0, tpot_s=0.1)
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
