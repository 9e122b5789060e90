"""The parts of benchmarks.gpu_check with their time budgets, and their tables."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks import (
    gpu_attention,
    gpu_conformance,
    gpu_engine,
    gpu_exactness,
    gpu_load,
    gpu_sampling,
    gpu_steps,
    gpu_swap,
)
from benchmarks.gpu_machine import Rates, dry_machine, gpu_machine, measure_rates
from benchmarks.gpu_plan import (
    Outcome,
    Part,
    Row,
    Run,
    plan_table,
    rows_alone_on_stdout,
    run_in_child,
    run_parts,
    serve_part,
)

RATES = "rates"


class Check:
    """All parts on this machine, their results in one JSON file."""

    def __init__(self, folder: Path, *, dry: bool, run: Run | None = None) -> None:
        """`run`: how to carry out a part, if not in a process of its own."""
        self._run = run or self._run_in_child
        self._folder = folder
        self._file = folder / "gpu_check.json"
        self._dry = dry
        self._started = time.monotonic()

    def run(self, wanted: Sequence[str]) -> bool:
        """The wanted parts (all, if none is named), one after another; whether all is well."""
        parts = self._parts()
        unknown = set(wanted) - {part.name for part in parts}
        if unknown:
            raise SystemExit(f"no such part: {', '.join(sorted(unknown))}\n{plan_table(parts)}")
        chosen = [part for part in parts if not wanted or part.name in {RATES, *wanted}]
        self._folder.mkdir(parents=True, exist_ok=True)
        report: dict[str, object] = {"date": time.strftime("%F"), "dry run": self._dry}
        print(f"{plan_table(chosen)}", flush=True)

        def done(part: Part, outcome: Outcome) -> None:
            report[part.name] = outcome.as_dict()
            report["total_seconds"] = round(time.monotonic() - self._started, 1)
            self._file.write_text(json.dumps(report, indent=2) + "\n")
            print_part(part.name, outcome)

        outcomes = run_parts(chosen, self._run, done)
        failed = [name for name, outcome in outcomes.items() if not outcome.passed]
        print(f"FAILED: {', '.join(failed)}" if failed else "all is well")
        return not failed

    def serve(self, name: str, seconds: float) -> None:
        """Be the process of one part."""
        rows = rows_alone_on_stdout()
        (part,) = (part for part in self._parts() if part.name == name)
        if self._dry:
            from tests.kernels.interpreter import gpu_arithmetic
        with gpu_arithmetic() if self._dry else nullcontext():
            serve_part(part, seconds, rows)

    def _run_in_child(self, part: Part, seconds: float) -> Outcome:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check"]
        command += ["--out", str(self._folder), "--serve-part", part.name]
        command += ["--seconds", str(seconds), *(["--dry-run"] if self._dry else [])]
        return run_in_child(command, seconds)

    def _rates(self) -> Rates:
        """As the first part measured them; not a number if it failed."""
        rows = json.loads(self._file.read_text())[RATES]["rows"]
        return Rates.from_row(rows[0]) if rows else Rates("", math.nan, math.nan)

    def _parts(self) -> list[Part]:
        """The most telling first: should the card be taken away, the end is missing."""
        shape = gpu_engine.dry_shape() if self._dry else gpu_engine.gpu_shape()
        machine = dry_machine if self._dry else gpu_machine
        rates = self._rates

        def checks() -> Iterator[Row]:
            return (check.as_dict() for check in gpu_conformance.run(machine()))

        return [
            Part(RATES, 20, lambda: iter([measure_rates(machine()).as_dict()])),
            Part("conformance", 110, checks),
            Part("exactness", 45, lambda: gpu_exactness.exactness_rows(shape)),
            Part("decode step", 90, lambda: gpu_steps.decode_step_rows(machine(), shape, rates())),
            Part("waiting", 25, lambda: gpu_steps.waiting_rows(machine(), shape)),
            Part("decode attention", 30, lambda: gpu_attention.decode_rows(machine(), rates())),
            Part("mixed attention", 15, lambda: gpu_attention.mixed_rows(machine())),
            Part("prefill attention", 35, lambda: gpu_attention.prefill_rows(machine(), rates())),
            Part("prefill tiles", 25, lambda: gpu_attention.tile_rows(machine(), rates())),
            Part("random draw", 25, lambda: gpu_sampling.draw_rows(machine())),
            Part("load", 65, lambda: gpu_load.load_rows(shape)),
            Part("swap", 15, lambda: gpu_swap.swap_rows(machine())),
            Part("batch invariance", 30, lambda: gpu_load.invariance_rows(shape)),
        ]


def print_part(name: str, outcome: Outcome) -> None:
    """What fits a screen; the rest is in the JSON."""
    print(f"{name}: {outcome.seconds:.0f} s", end="")
    print(", its time was over, so rows may be missing" if outcome.cut else "")
    if name == "conformance":
        wrong = [row for row in outcome.rows if not row["passed"]]
        print(f"  {len(outcome.rows) - len(wrong)} of {len(outcome.rows)} kernels right")
        for row in wrong:
            print(f"  WRONG {row['name']}: error {row['error']:.2e}, bound {row['bound']:.0e}")
    elif outcome.rows:
        print_table(outcome.rows)
    if outcome.error is not None:
        print(f"  STOPPED: {outcome.error}")
    sys.stdout.flush()


def print_table(rows: Sequence[Row]) -> None:
    """Columns as wide as their contents, or as ten characters."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(10, len(name), *(len(row[at]) for row in cells)) for at, name in enumerate(names)]
    for line in [names, *cells]:
        print(
            "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
