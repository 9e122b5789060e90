"""What Triton lacks on a machine is one line at start."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve.errors import ConfigError
from serve.kernels.select import select_kernels
from serve.kernels.triton import toolchain
from tests.kernels.test_select import ANY


def machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, cc: str | None = None, installed: str = "gcc"
) -> SimpleNamespace:
    """Triton's settings on a machine with these compilers, where kernels are not interpreted."""
    runtime = SimpleNamespace(interpret=False, jit_post_compile_hook=None)
    knobs = SimpleNamespace(
        runtime=runtime, build=SimpleNamespace(cc=cc), cache=SimpleNamespace(dir=str(folder))
    )
    monkeypatch.setattr(toolchain, "triton", SimpleNamespace(knobs=knobs))
    found = {name: f"/usr/bin/{name}" for name in installed.split()}
    monkeypatch.setattr(
        shutil, "which", lambda name: found.get(name, name if "/" in name else None)
    )
    return runtime


def test_a_machine_with_a_compiler_and_a_folder_is_fine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for installed in ("gcc", "clang"):
        machine(monkeypatch, tmp_path / "new" / "cache", installed=installed)
        toolchain.check_toolchain()
    assert list((tmp_path / "new" / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("cc", "message"),
    [(None, r"C compiler .* there is none\. Install gcc"), ("mycc", "no mycc, which CC names")],
)
def test_a_missing_compiler_stops_the_start_whatever_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cc: str | None, message: str
) -> None:
    machine(monkeypatch, tmp_path, cc=cc, installed="")
    for backend in ("auto", "triton"):
        with pytest.raises(ConfigError, match=message):
            select_kernels("cuda", backend, **ANY)


def test_a_cache_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()  # root may write anywhere but into this
    machine(monkeypatch, tmp_path / "file" / "cache")
    with pytest.raises(
        ConfigError, match=r"file/cache, which cannot be written .*TRITON_CACHE_DIR"
    ):
        select_kernels("cuda", "auto", **ANY)


def test_compilations_are_counted_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = machine(monkeypatch, tmp_path)
    with caplog.at_level(logging.INFO), toolchain.showing_progress():
        for _ in range(3):
            runtime.jit_post_compile_hook(key="k")
    assert f"3 kernels compiled, or found in {tmp_path}: " in caplog.text
    assert runtime.jit_post_compile_hook is None
