"""Compile kernels for GPUs that need not be there, and report what the compilers made of them.

`python -m tests.kernels.compile_all TARGET [--all]` prints one JSON object per variant. It must be
a process of its own: where tests run interpreted, the kernels cannot be compiled any more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tests.kernels.variants import Variant, all_variants, default_variants

_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Report:
    """What a compiled kernel is made of."""

    label: str
    target: str
    shared_bytes: int
    spills: int  # stores of a register to memory
    wide_load_bytes: int  # read by a program's 16-byte load instructions, counted once each
    copies_ahead: int  # instructions that load for a later turn of a loop
    matrix_instructions: int
    kv_tile_bytes: int
    seconds: float  # next to nothing if Triton finds it in its cache, which it keeps by source


def compile_variant(variant: Variant, target: str) -> Report:
    backend, arch = target.split(":")
    gpu = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
    }
    started = time.monotonic()
    compiled = triton.compile(variant.source(), target=gpu, options=options)
    seconds = time.monotonic() - started
    spills, wide_loads, ahead, matrix = _nvidia(compiled) if backend == "cuda" else _amd(compiled)
    return Report(
        label=variant.label,
        target=target,
        shared_bytes=compiled.metadata.shared,
        spills=spills,
        wide_load_bytes=wide_loads * 16 * gpu.warp_size * variant.num_warps,
        copies_ahead=ahead,
        matrix_instructions=matrix,
        kv_tile_bytes=variant.kv_tile_bytes,
        seconds=round(seconds, 2),
    )


def _nvidia(compiled: Any) -> tuple[int, int, int, int]:
    """(spills, 16-byte loads, loads ahead, tensor-core instructions) of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [_NVIDIA_TOOLS / "nvdisasm", "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opcodes = Counter(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", text))
    return (
        _count(opcodes, r"STL"),
        _count(opcodes, r"LDG(STS)?\..*128"),
        _count(opcodes, r"LDGSTS"),
        _count(opcodes, r"(H|HG|UTCH|UTCQ|Q|QG)MMA"),
    )


def _amd(compiled: Any) -> tuple[int, int, int, int]:
    """The same of an AMD code object, from its assembly, which shows no loads ahead."""
    text = compiled.asm["amdgcn"]
    spilled = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    assert spilled, "the assembly names no spill count"
    opcodes = Counter(re.findall(r"^\s+([a-z]\w+)", text, re.MULTILINE))
    return (
        int(spilled[1]),
        _count(opcodes, r"(global|buffer|flat)_load_dwordx4"),
        0,
        _count(opcodes, r"v_mfma"),
    )


def _count(opcodes: Counter[str], pattern: str) -> int:
    return sum(count for opcode, count in opcodes.items() if re.match(pattern, opcode))


def main(target: str, variants: str = "") -> None:
    choose = all_variants if variants == "--all" else default_variants
    for variant in choose(target):
        print(json.dumps(asdict(compile_variant(variant, target))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
