"""The compiled CPU kernels, once per number of threads for the whole test run."""

from __future__ import annotations

from functools import cache

import pytest

from serve.errors import ConfigError
from serve.kernels.base import Kernels
from serve.kernels.cpu import cpu_kernels


@cache
def _compiled(num_threads: int) -> Kernels | ConfigError:
    try:
        return cpu_kernels(num_threads=num_threads)
    except ConfigError as reason:
        return reason


def compiled(num_threads: int = 2) -> Kernels:
    """The kernels, or a skipped test where there is no compiler or no AVX2."""
    kernels = _compiled(num_threads)
    if isinstance(kernels, ConfigError):
        pytest.skip(str(kernels))
    return kernels
