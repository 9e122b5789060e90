"""Compiles the C++ of this folder at first use and keeps the result in the user's cache.

A plain C interface called through ctypes: it needs a C++ compiler and nothing else (no Python or
torch headers, no ninja), compiles in seconds, and one file serves every Python and torch version.
torch.utils.cpp_extension was the alternative; it takes over half a minute for its headers alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from serve.config import cache_folder
from serve.errors import ConfigError

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_ISA_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
}
# Contraction is off because a multiply and an add fused by the compiler in one place and not in
# another would round differently: see simd.h. Loops begin at cache lines because the inner ones,
# of some twenty instructions, otherwise take 1.0 to 1.4 times as long, by chance (Zen 3).
_FLAGS = (
    *("-std=c++20", "-O3", "-falign-loops=64", "-ffp-contract=off", "-fno-math-errno"),
    *("-fPIC", "-pthread", "-w"),
)

_REMOVE = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


def load_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The compiled kernels for this CPU, built now if the cache does not have them.

    Safe when several processes start at once: one builds, in a folder of its own, and moves the
    file into place; the others wait for it.
    Raises ConfigError when this CPU or the lack of a compiler makes it impossible.
    """
    isa, library = _library_file(cache_dir)
    if not library.exists():
        _compile(isa, library)
    return ctypes.CDLL(str(library))


def compile_ahead() -> None:
    """Begin to compile for `load_library` in the background, if the cache does not have them. What
    goes wrong is met again there, by whoever needs the kernels, and told then."""

    def compile_missing() -> None:
        with suppress(ConfigError):
            isa, library = _library_file(None)
            if not library.exists():
                _compile(isa, library)

    threading.Thread(target=compile_missing, name="compile", daemon=True).start()


def _library_file(cache_dir: Path | None) -> tuple[str, Path]:
    """The instruction set, and where its kernels are kept. Raises ConfigError."""
    isa = torch.backends.cpu.get_cpu_capability()
    if isa not in _ISA_FLAGS:
        raise ConfigError(f"the cpu kernels need AVX2, and this CPU offers {isa}")
    directory = cache_dir or cache_folder() / "kernels"
    return isa, directory / f"cpu-{isa.lower()}-{_fingerprint(isa)}.so"


def _fingerprint(isa: str) -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *_ISA_FLAGS[isa])).encode())
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(isa: str, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ConfigError(
            f"the cpu kernels need a C++ compiler ({', '.join(_COMPILERS)}) once, at first start; "
            "install one, for example with: apt-get install g++"
        )
    logger.info("compiling the CPU kernels for %s with %s (only at first start)", isa, compiler)
    started = time.perf_counter()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _turn(library.parent):
            if library.exists():  # another made it meanwhile
                return
            with _scratch_folder(library.parent) as scratch:
                os.replace(_build(compiler, isa, scratch), library)
    except OSError as error:
        raise ConfigError(
            f"the cpu kernels cannot be built in {library.parent}: {error}"
        ) from error
    logger.info("compiled the CPU kernels in %.0f s: %s", time.perf_counter() - started, library)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One builder at a time, of all threads and processes; a killed one gives its turn up. Where
    the file system has no locks, several build at once, which only costs time."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder that goes with us, however we end: another process waits for the end of a pipe that
    only we hold open, and removes it then."""
    folder = tempfile.mkdtemp(dir=parent, prefix="build-")
    remover = subprocess.Popen(
        [sys.executable, "-ISc", _REMOVE, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # what ends our process group must not end it
    )
    try:
        yield Path(folder)
    finally:
        remover.communicate()


def _build(compiler: str, isa: str, scratch: Path) -> Path:
    """Object files side by side, one process each, then one link."""

    def compile_one(source: Path) -> str:
        target = scratch / f"{source.stem}.o"
        _run([compiler, *_FLAGS, *_ISA_FLAGS[isa], "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        objects = list(workers.map(compile_one, sorted(_SOURCES.glob("*.cpp"))))
    library = scratch / "kernels.so"
    _run([compiler, *_FLAGS, "-shared", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise ConfigError(f"the cpu kernels do not compile with {command[0]}: {reason}")
