"""The prepared GPU run goes through from end to end where there is no GPU, and loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_load, gpu_sampling, gpu_swap
from benchmarks.gpu_plan import Row, run_here
from benchmarks.gpu_report import Check

ROOT = Path(__file__).parents[2]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    return report


def test_a_dry_run_goes_through_every_part_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Check(tmp_path, dry=True, run=run_here).run([])

    report = report_of(tmp_path)
    parts = {name: part for name, part in report.items() if isinstance(part, dict)}
    assert not [name for name, part in parts.items() if part["cut"] or part["error"]]
    rows = {name: part["rows"] for name, part in parts.items()}
    checked = " ".join(check["name"] for check in rows["conformance"])
    kernels = ("attention", "e4m3", "norm", "rotary", "heads", "silu", "linear", "swap", "draw")
    for kernel in kernels:
        assert kernel in checked, checked
    assert rows["rates"][0]["copy_gb_s"] > 0
    *settings, beside = rows["exactness"]
    assert len(settings) == 8
    for row in settings:
        assert row["equal bits"] == row["requests"] > 1, row
        assert (row["preemptions"] > 0) == ("preempted" in row["setting"]), row
    assert beside["largest difference"] == 0, "a dry run has plain torch on both sides"
    assert [row["batch"] for row in rows["decode attention"]] == [1, 1, 2, 2]
    assert rows["prefill attention"][0]["times torch's speed"] > 0
    assert {(row["longest"], row["prompt"]) for row in rows["mixed attention"]} == {
        (20, 5),
        (90, 0),
    }
    assert [row["the table's"] for row in rows["prefill tiles"]] == [True] + [False] * 4
    assert {row["kind"] for row in rows["random draw"]} == set(gpu_sampling.KINDS)
    steps = rows["decode step"]
    assert len(steps) == 2 * 4 + 1, "graphs and overlap on and off, and lengths that differ"
    for row in steps:
        assert 0 < row["ms of the host"] <= row["ms a step"]
        assert 0 <= row["device idle"] < 1
    assert {row["steps with"] for row in rows["waiting"]} >= {"greedy", "min_tokens", "penalties"}
    assert [row["chunked"] for row in rows["load"]] == [True, False]
    assert {row["into the GPU"] for row in rows["swap"]} == {True, False}
    (bits,) = rows["batch invariance"]
    assert bits["equal bits"] == bits["tokens"] > 0
    printed = capsys.readouterr().out
    assert "all is well" in printed
    assert printed.index("random draw: ") < printed.index("load: "), "each when it is done"


def test_a_part_that_raises_costs_its_own_remaining_rows_and_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*arguments: object) -> Iterator[Row]:
        yield {"number": 1}
        raise RuntimeError("an illegal memory access was encountered")

    def unequal(*arguments: object) -> Iterator[Row]:
        yield {"equal bits": 3, "passed": False}

    monkeypatch.setattr(gpu_sampling, "draw_rows", breaks)
    monkeypatch.setattr(gpu_load, "invariance_rows", unequal)
    check = Check(tmp_path, dry=True, run=run_here)

    assert not check.run(["swap", "random draw", "batch invariance"])

    report = report_of(tmp_path)
    assert report["random draw"]["rows"] == [{"number": 1}]
    assert "illegal memory access" in report["random draw"]["error"]
    assert "in breaks" in report["random draw"]["error"], "the traceback is kept"
    assert report["swap"]["passed"]
    assert len(report["swap"]["rows"]) == 2
    assert "FAILED: random draw, batch invariance" in capsys.readouterr().out


def test_what_ended_before_a_crash_of_the_check_itself_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> Iterator[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_swap, "swap_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        Check(tmp_path, dry=True, run=run_here).run(["random draw", "swap"])
    assert {"rates", "random draw"} <= report_of(tmp_path).keys()


def test_the_command_runs_parts_in_processes_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run(
        [*command, "--parts", "swap"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert {"rates", "swap"} <= report_of(tmp_path).keys()
    assert "share of plain" in run.stdout

    run = subprocess.run(
        [*command, "--parts", "swop"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "no such part: swop" in run.stderr
