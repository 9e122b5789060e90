"""What the kernel tests need of Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import gpu_arithmetic


@pytest.fixture(autouse=True)
def _gpu_arithmetic() -> Iterator[None]:
    with gpu_arithmetic():
        yield
