"""What the kernel tests need of Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import widened_dots


@pytest.fixture(scope="package", autouse=True)
def _interpreter_knows_bfloat16() -> Iterator[None]:
    with widened_dots():
        yield
