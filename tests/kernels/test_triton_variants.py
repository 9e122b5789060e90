"""Nothing is compiled once an engine is ready, whatever comes: counted on a GPU that is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("flags", [(), ("--batch-invariant",)], ids=["default", "invariant"])
def test_every_kernel_is_compiled_before_the_first_request(flags: tuple[str, ...]) -> None:
    """Lengths, batches, sampling and swaps of all kinds; `python -m tests.kernels.trace_steps
    10000` takes longer, and finds nothing either."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.trace_steps", "400", *flags],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    assert report["while serving"] == []
    assert report["swaps"] > 0
    assert report["launches"] > 2000
    attention = {"ragged_attention_kernel"}
    if not flags:
        attention |= {"plan_pieces_kernel", "decode_attention_kernel", "merge_pieces_kernel"}
    assert attention | {"choose_kernel", "penalize_kernel"} <= set(report["at start"])
    assert len(report["at start"]) < 18, "few enough to wait for"
