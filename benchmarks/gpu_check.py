"""Confirm the GPU path on a real GPU: one command, tables as they come, JSON beside them.

    python -m benchmarks.gpu_check --out DIR [--dry-run] [--parts "swap,load"]

Parts: what this card's copy bandwidth and matmul rate are; every kernel against its twin; a whole
model with graphs, overlap and preemption on and off, bit for bit; decode, mixed and prefill
attention as shares of the card's rates; random draws; swap; an 8B Llama with dummy weights: decode
steps, what its steps wait for, throughput, latency under long prompts; a request's bits alone and
in company.
Each part has a process of its own and a budget of seconds, under 9 minutes together, and leaves out
rows that exceed it. gpu_check.json is complete up to the last part that ended, at any time.
`--dry-run` goes through the same code with tiny sizes in Triton's interpreter, on a machine without
a GPU; its rates mean nothing.
Exit status 1 when anything is wrong, or a part stopped by an error.
"""

from __future__ import annotations

import argparse
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
    parser.add_argument("--parts", default="", help="only these, separated by commas")
    parser.add_argument("--serve-part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, by gpu_report

    from benchmarks.gpu_report import Check

    check = Check(arguments.out, dry=arguments.dry_run)
    if arguments.serve_part:
        check.serve(arguments.serve_part, arguments.seconds)
        return 0
    wanted = [name.strip() for name in arguments.parts.split(",") if name.strip()]
    return 0 if check.run(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
