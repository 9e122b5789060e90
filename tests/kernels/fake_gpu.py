"""A GPU that compiles nothing and runs nothing: what the host does for a launch, and no more.

Triton's own code binds and specializes the arguments, and looks the kernel up; in place of a
compilation there is a count, in place of a launch nothing. Tensors are in host memory. Needs a
process in which Triton does not interpret (TRITON_INTERPRET=0).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


class _FakeKernel:
    """A compiled kernel as Triton's launches and ours use it."""

    function = packed_metadata = None

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def run(self, *arguments: object) -> None:
        self._gpu.num_launches += 1

    def launch_metadata(self, grid: object, stream: int, *arguments: object) -> None:
        pass

    def __getitem__(self, grid: object) -> Any:
        # As CompiledKernel has it, which asks the driver for the stream of each launch.
        def launch(*arguments: object) -> None:
            driver = triton.runtime.driver.active
            driver.get_current_stream(driver.get_current_device())
            self.run(grid, *arguments)

        return launch


@dataclass
class FakeGpu:
    """What was asked of it."""

    compiled: list[str] = field(default_factory=list)  # kernels' names, one per variant
    num_launches: int = 0

    def compile(self, source: Any, **options: Any) -> _FakeKernel:
        self.compiled.append(source.fn.fn.__name__)
        return _FakeKernel(self)


class _Driver:
    """As much of a driver as launching asks for."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 132})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def install() -> FakeGpu:
    """An H200, as far as the host can tell, for the rest of this process."""
    assert not triton.knobs.runtime.interpret, "set TRITON_INTERPRET=0"
    gpu = FakeGpu()
    triton.runtime.driver.set_active(_Driver())
    triton.compiler.compile = gpu.compile
    return gpu
