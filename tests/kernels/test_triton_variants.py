"""Nothing is compiled once an engine is ready, whatever comes: counted on a GPU that is made up."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import serve.kernels.triton

BY_FOREIGN_MODELS = "our models do it within prepare_heads_kernel"
WHOLE_CONTEXTS = "a context cut in pieces adds up in another order, with other company"
NOT_LAUNCHED = {
    "default": {
        "matmul_kernel": "the vendor's library multiplies",
        "rotary_kernel": BY_FOREIGN_MODELS,
        "kv_write_kernel": BY_FOREIGN_MODELS,
    },
    "invariant": {
        "rotary_kernel": BY_FOREIGN_MODELS,
        "kv_write_kernel": BY_FOREIGN_MODELS,
        "plan_pieces_kernel": WHOLE_CONTEXTS,
        "decode_attention_kernel": WHOLE_CONTEXTS,
        "merge_pieces_kernel": WHOLE_CONTEXTS,
    },
}
"""Kernels that a native model's engine never launches, and why."""


def launched_kernels() -> set[str]:
    """Names of the kernels that are launched anywhere: by a Launcher, or by `kernel[grid](...)`."""
    names = set()
    for path in Path(serve.kernels.triton.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="Launcher"), args=[ast.Name(id=name)]):
                    names.add(name)
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))) if "kernel" in name:
                    names.add(name)
    return names


@pytest.mark.parametrize("engine", NOT_LAUNCHED)
def test_every_kernel_is_compiled_before_the_first_request(engine: str) -> None:
    """Lengths, batches, sampling and swaps of all kinds; `python -m tests.kernels.trace_steps
    10000` takes longer, and finds nothing either."""
    flags = {"default": (), "invariant": ("--batch-invariant",)}[engine]
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
    assert set(report["at start"]) == launched_kernels() - set(NOT_LAUNCHED[engine])
    assert len(report["at start"]) < 18, "few enough to wait for"
