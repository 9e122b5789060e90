"""What this machine is, and what it can do at this moment: shared machines drift."""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured, with all cores."""

    read_gb_s: float
    gemm_gflop_s: float  # fp32

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"reads {self.read_gb_s:.1f} GB/s, fp32 GEMM {self.gemm_gflop_s:.0f} GFLOP/s"


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, str | int]:
    """Processor, cores, system, versions and date."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": time.strftime("%F %T%z"),
        "load_average": f"{os.getloadavg()[0]:.1f}",
    }


def measure_rates(repeats: int = 7) -> Rates:
    """Read bandwidth (matrix times vector, far larger than the caches) and fp32 GEMM peak."""
    matrix, vector = _in_huge_pages(12288, 4096), torch.randn(4096)
    square = torch.randn(1536, 1536)
    reading = _median_s(lambda: torch.mv(matrix, vector), repeats)
    multiplying = _median_s(lambda: square @ square, repeats)
    return Rates(
        read_gb_s=matrix.numel() * 4 / reading / 1e9,
        gemm_gflop_s=2 * 1536**3 / multiplying / 1e9,
    )


def _in_huge_pages(rows: int, columns: int) -> torch.Tensor:
    """An fp32 matrix in the largest pages the system gives: page walks are no bandwidth."""
    memory = mmap.mmap(-1, rows * columns * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns).fill_(0.5)


def _median_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
