"""Confirm the GPU path on a real GPU: one command, a table at the end, JSON beside it.

    python -m benchmarks.gpu_check --out DIR [--dry-run]

Parts: (1) what this card's copy bandwidth and matmul rate are, (2) every kernel against its twin,
(3) decode and prefill attention as shares of those, (4) an 8B Llama with dummy weights: decode
steps, throughput, latency under long prompts, swap, (5) a request's bits alone and in company.
Each part has a budget of seconds, under 8 minutes together, and leaves out rows that exceed it.
`--dry-run` goes through the same code with tiny sizes in Triton's interpreter, on a machine without
a GPU; its rates mean nothing.
Exit status 1 when a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreted, no GPU")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, by gpu_report

    from benchmarks.gpu_report import dry_report, full_report, print_report

    arguments.out.mkdir(parents=True, exist_ok=True)
    report = dry_report() if arguments.dry_run else full_report()
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n")
    print_report(report)
    return 0 if all(check["passed"] for check in report["conformance"]) else 1


if __name__ == "__main__":
    sys.exit(main())
