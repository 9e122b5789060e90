"""What each policy of the scheduler is good for, in numbers.

    python -m benchmarks.policies

The real scheduler and cache in `serve-llm simulate`'s virtual time, over its default costs (an
8-billion-parameter model on a large GPU: calculated, not measured). So the numbers depend on
nothing but this repository, and tell policies apart, not machines. Writes results/policies.md and
one plot per comparison.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.policies_prefill import prefill_orders
from benchmarks.policies_room import preemption_modes, thrash_guard, victims
from benchmarks.policies_service import service_orders, step_policies
from benchmarks.policies_simulated import as_markdown
from serve.bench.plot import new_figure

COMPARISONS = (
    preemption_modes,
    victims,
    thrash_guard,
    step_policies,
    prefill_orders,
    service_orders,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = ["# Policies of the scheduler, compared in virtual time\n"]
    parts.append("Made by `python -m benchmarks.policies`; costs are simulate's defaults.\n")
    for compare in COMPARISONS:
        comparison = compare()
        parts.append(as_markdown(comparison))
        print(parts[-1])
        figure, axes = new_figure(1, comparison.num_plots, (9, 4))
        comparison.draw(axes)
        figure.savefig(options.out / f"policies-{comparison.name}.png", dpi=120)
    (options.out / "policies.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
