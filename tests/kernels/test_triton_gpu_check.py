"""The prepared GPU run goes through from end to end where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_checks_every_kernel_and_writes_its_report(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(check["passed"] for check in report["conformance"])
    checked = " ".join(check["name"] for check in report["conformance"])
    kernels = ("attention", "e4m3", "norm", "rotary", "heads", "silu", "linear", "swap", "draw")
    for kernel in kernels:
        assert kernel in checked, checked
    assert report["rates"]["copy_gb_s"] > 0
    assert report["cut"] == []
    assert [row["batch"] for row in report["decode_attention"]] == [1, 1, 2, 2]
    assert report["prefill_attention"][0]["times torch's speed"] > 0
    assert len(report["decode_step"]) == 2 * 4, "graphs and overlap, on and off, for each batch"
    for row in report["decode_step"]:
        assert 0 < row["ms of the host"] <= row["ms a step"]
        assert 0 <= row["device idle"] < 1
    assert [row["chunked"] for row in report["load"]] == [True, False]
    assert {row["into the GPU"] for row in report["swap"]} == {True, False}
    (bits,) = report["batch_invariance"]
    assert bits["equal bits"] == bits["tokens"] > 0
    assert "equal bits" in run.stdout.splitlines()[-2], "the table comes last"
