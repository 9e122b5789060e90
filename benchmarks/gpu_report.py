"""The sections of benchmarks.gpu_check, run one after another, and their table."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import gpu_attention, gpu_conformance, gpu_engine
from benchmarks.gpu_machine import Machine, dry_machine, gpu_machine, measure_rates

Report = dict[str, Any]

_TABLES = (
    "decode_attention",
    "prefill_attention",
    "decode_step",
    "load",
    "swap",
    "batch_invariance",
)


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
    return {
        "machine": machine.description,
        "date": time.strftime("%F"),
        "rates": rates.as_dict(),
        "conformance": [check.as_dict() for check in gpu_conformance.run(machine)],
        "decode_attention": gpu_attention.decode_table(machine, rates),
        "prefill_attention": gpu_attention.prefill_table(machine, rates),
        "decode_step": gpu_engine.decode_step_table(shape, rates),
        "load": gpu_engine.load_table(shape),
        "swap": gpu_engine.swap_table(machine),
        "batch_invariance": gpu_engine.invariance(shape),
        "seconds": round(time.monotonic() - started, 1),
    }


def print_report(report: Report) -> None:
    """What fits a screen; the rest is in the JSON."""
    checks, rates = report["conformance"], report["rates"]
    wrong = [check for check in checks if not check["passed"]]
    print(f"{report['machine']}, {report['date']}, {report['seconds']} s")
    print(f"kernels: {len(checks) - len(wrong)} of {len(checks)} right")
    for check in wrong:
        print(f"  WRONG {check['name']}: error {check['error']:.2e}, bound {check['bound']:.0e}")
    print(f"copy {rates['copy_gb_s']:.0f} GB/s, matmul {rates['matmul_tflop_s']:.0f} TFLOP/s")
    for title in _TABLES:
        print(title.replace("_", " "))
        print_table(report[title])


def print_table(rows: list[dict[str, float]]) -> None:
    """Columns as wide as their names, or as ten characters."""
    widths = {name: max(10, len(name)) for name in rows[0]}
    print("  " + "  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("  " + "  ".join(f"{row[name]:>{width}.4g}" for name, width in widths.items()))
