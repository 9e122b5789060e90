"""The parts of benchmarks.gpu_check with their time budgets, and their tables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import gpu_attention, gpu_conformance, gpu_engine, gpu_load, gpu_steps, gpu_swap
from benchmarks.gpu_machine import Machine, dry_machine, gpu_machine, measure_rates
from benchmarks.gpu_plan import Part, Row, plan_table, run_parts

Report = dict[str, Any]


def full_report() -> Report:
    """On the GPU of this process."""
    return _measure(gpu_machine(), gpu_engine.gpu_shape())


def dry_report() -> Report:
    """On a CPU, interpreted."""
    from tests.kernels.interpreter import gpu_arithmetic

    with gpu_arithmetic():
        return _measure(dry_machine(), gpu_engine.dry_shape())


def _measure(machine: Machine, shape: gpu_engine.Shape) -> Report:
    started = time.monotonic()
    rates = measure_rates(machine)

    def checks() -> Iterator[Row]:
        return (check.as_dict() for check in gpu_conformance.run(machine))

    # Together under 8 minutes with what importing and the rates take.
    parts = [
        Part("conformance", 110, checks),
        Part("decode attention", 40, lambda: gpu_attention.decode_rows(machine, rates)),
        Part("prefill attention", 40, lambda: gpu_attention.prefill_rows(machine, rates)),
        Part("decode step", 110, lambda: gpu_steps.decode_step_rows(machine, shape, rates)),
        Part("load", 90, lambda: gpu_load.load_rows(shape)),
        Part("swap", 10, lambda: gpu_swap.swap_rows(machine)),
        Part("batch invariance", 40, lambda: gpu_load.invariance_rows(shape)),
    ]
    print(f"{machine.description}: the plan\n{plan_table(parts)}", flush=True)
    outcomes = run_parts(parts)
    return {
        "machine": machine.description,
        "date": time.strftime("%F"),
        "rates": rates.as_dict(),
        **{name.replace(" ", "_"): outcome.rows for name, outcome in outcomes.items()},
        "seconds": {name: round(outcome.seconds, 1) for name, outcome in outcomes.items()},
        "cut": [name for name, outcome in outcomes.items() if outcome.cut],
        "total_seconds": round(time.monotonic() - started, 1),
    }


def print_report(report: Report) -> None:
    """What fits a screen; the rest is in the JSON."""
    checks, rates = report["conformance"], report["rates"]
    wrong = [check for check in checks if not check["passed"]]
    print(f"{report['machine']}, {report['date']}, {report['total_seconds']} s")
    print(f"kernels: {len(checks) - len(wrong)} of {len(checks)} right")
    for check in wrong:
        print(f"  WRONG {check['name']}: error {check['error']:.2e}, bound {check['bound']:.0e}")
    for name in report["cut"]:
        print(f"its time was over, so rows may be missing: {name}")
    print(f"copy {rates['copy_gb_s']:.0f} GB/s, matmul {rates['matmul_tflop_s']:.0f} TFLOP/s")
    for name in report["seconds"]:
        if name != "conformance":
            print(name)
            print_table(report[name.replace(" ", "_")])


def print_table(rows: list[dict[str, float]]) -> None:
    """Columns as wide as their names, or as ten characters."""
    widths = {name: max(10, len(name)) for name in rows[0]}
    print("  " + "  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("  " + "  ".join(f"{row[name]:>{width}.4g}" for name, width in widths.items()))
