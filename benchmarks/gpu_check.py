"""Confirm the GPU path on a real GPU: one command, a table at the end, JSON beside it.

    python -m benchmarks.gpu_check --out DIR [--dry-run]

Sections: (1) every kernel against its twin, (2) what this card's copy bandwidth and matmul rate
are, (3) decode and prefill attention as shares of those. `--dry-run` goes through the same code
with tiny sizes in Triton's interpreter, on a machine without a GPU; its rates mean nothing.
Exit status 1 when a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreted, no GPU")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, below

    from benchmarks import gpu_attention, gpu_conformance, gpu_machine

    machine = gpu_machine.dry_machine() if arguments.dry_run else gpu_machine.gpu_machine()
    started = time.monotonic()
    report: dict[str, object] = {"machine": machine.description, "date": time.strftime("%F")}
    checks = gpu_conformance.run(machine)
    report["conformance"] = [check.as_dict() for check in checks]
    rates = gpu_machine.measure_rates(machine)
    report["rates"] = rates.as_dict()
    decode = gpu_attention.decode_table(machine, rates)
    report["decode_attention"] = decode
    prefill = gpu_attention.prefill_table(machine, rates)
    report["prefill_attention"] = prefill
    report["seconds"] = round(time.monotonic() - started, 1)

    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n")
    wrong = [check for check in checks if not check.passed]
    print(f"{machine.description}, {report['date']}, {report['seconds']} s")
    print(f"kernels: {len(checks) - len(wrong)} of {len(checks)} right")
    for check in wrong:
        print(f"  WRONG {check.name}: error {check.error:.2e}, bound {check.bound:.0e}")
    print(f"copy {rates.copy_gb_s:.0f} GB/s, matmul {rates.matmul_tflop_s:.0f} TFLOP/s")
    print_table("decode attention", decode)
    print_table("prefill attention", prefill)
    return 1 if wrong else 0


def print_table(title: str, rows: list[dict[str, float]]) -> None:
    """Columns as wide as their names."""
    print(title)
    print("  " + "  ".join(rows[0]))
    for row in rows:
        print("  " + "  ".join(f"{value:>{len(name)}.4g}" for name, value in row.items()))


if __name__ == "__main__":
    sys.exit(main())
