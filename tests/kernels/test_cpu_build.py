"""Compiling at first start, and the kernels' place in the selection."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from serve.errors import ConfigError
from serve.kernels.cpu import build, cpu_kernels
from serve.kernels.select import select_kernels
from tests.kernels.cpu_kernels import compiled


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only copies an empty shared library, and notes each call in a file."""
    compiled()  # skips where there is no real compiler
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    empty = tmp_path / "empty.so"
    subprocess.run([compiler, "-shared", "-x", "c++", "/dev/null", "-o", empty], check=True)
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "g++"
    script.write_text(
        "#!/bin/sh\n"
        f"echo run >> {tmp_path}/calls\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'/bin/cp {empty} "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return tmp_path / "calls"


def _runs_of_a_build() -> int:
    return len(list(Path(build.__file__).parent.glob("*.cpp"))) + 1  # and a link


def test_a_second_start_finds_the_compiled_file(tmp_path: Path, fake_compiler: Path) -> None:
    build.load_library(tmp_path / "cache")
    calls = fake_compiler.read_text()

    build.load_library(tmp_path / "cache")

    assert fake_compiler.read_text() == calls
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_the_library_is_kept_where_the_environment_says(
    tmp_path: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_LLM_CACHE", str(tmp_path / "mine"))

    build.load_library()

    assert [path.suffix for path in (tmp_path / "mine" / "kernels").iterdir()] == [".so"]


def test_starts_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, fake_compiler: Path
) -> None:
    outcomes: list[object] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(build.load_library(tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(outcomes) == 4
    assert len(fake_compiler.read_text().splitlines()) == _runs_of_a_build()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_compilation_begun_ahead_is_the_one_that_is_loaded(
    tmp_path: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_LLM_CACHE", str(tmp_path / "mine"))
    build.compile_ahead()
    build.load_library()

    expected = _runs_of_a_build()
    assert len(fake_compiler.read_text().splitlines()) == expected

    build.compile_ahead()  # of a second start
    build.load_library()
    assert len(fake_compiler.read_text().splitlines()) == expected


def test_a_compilation_ahead_that_fails_is_told_to_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_LLM_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    build.compile_ahead()

    with pytest.raises(ConfigError, match="apt-get install"):
        build.load_library()


def test_a_build_that_is_killed_leaves_no_files_behind(tmp_path: Path) -> None:
    """By SIGKILL, of which it hears nothing."""
    code = f"""
import os, pathlib, signal
from serve.kernels.cpu.build import _scratch_folder
with _scratch_folder(pathlib.Path({str(tmp_path)!r})) as folder:
    (folder / "half.o").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL

    for _ in range(600):
        if not any(tmp_path.iterdir()):
            break
        time.sleep(0.05)
    assert not any(tmp_path.iterdir())


def test_no_compiler_is_a_reason_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match=r"C\+\+ compiler.*install"):
        cpu_kernels(cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    compiled()
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "file"))):
        cpu_kernels(cache_dir=tmp_path / "file")


def test_a_source_that_does_not_compile_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)

    with pytest.raises(ConfigError, match=r"do not compile.*error"):
        build.load_library(tmp_path / "cache")


def test_the_cpu_gets_these_kernels_by_default() -> None:
    compiled()

    kernels, reason = select_kernels(
        "cpu", "auto", dtype=torch.float32, head_dims={64}, block_size=16, num_threads=1
    )

    assert kernels.name == "cpu"
    assert reason
