"""What Triton needs of the machine before its first compilation, and what it does then.

Without these checks each lack would come up in the middle of a start, as a stack trace from deep
within Triton.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from rich.console import Console

from serve.errors import ConfigError

logger = logging.getLogger(__name__)


def check_toolchain() -> None:
    """Raises ConfigError in one line if kernels cannot be compiled here, or not be kept."""
    if triton.knobs.runtime.interpret:
        return
    compiler = triton.knobs.build.cc or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        raise ConfigError(
            f"Triton needs a C compiler for its kernels' launchers, and there is "
            f"{'none' if compiler is None else f'no {compiler}, which CC names'}. Install gcc and "
            "the headers of libc (Debian: apt-get install gcc libc6-dev), or set CC."
        )
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"Triton keeps compiled kernels in {folder}, which cannot be written "
            f"({error.strerror}). Set TRITON_CACHE_DIR to a folder that can, or change its owner."
        ) from error


@contextmanager
def showing_progress() -> Iterator[None]:
    """Kernels compiled meanwhile are counted on a terminal, and in a log line at the end."""
    started, count = time.monotonic(), 0
    console = Console(stderr=True)
    folder = Path(triton.knobs.cache.dir)
    with console.status("compiling kernels") as status:

        def compiled(**what: Any) -> None:
            nonlocal count
            count += 1
            status.update(f"compiling kernels: {count}")

        hook = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = compiled
        try:
            yield
        finally:
            triton.knobs.runtime.jit_post_compile_hook = hook
    seconds = time.monotonic() - started
    logger.info("%d kernels compiled, or found in %s: %.1f s", count, folder, seconds)
