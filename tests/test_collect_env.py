"""`collect-env`: it names the machine and its packages, and no secret leaves through it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serve import collect_env
from serve.cli import main

SECRETS = {
    "SERVE_LLM_API_KEY": "sk-planted-one",
    "HF_TOKEN": "hf_planted_two",
    "HF_ENDPOINT": "https://user:planted-three@hub.example",
    "HTTPS_PROXY": "http://user:planted-four@proxy.example",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=planted-five",
}
COMMAND = [sys.executable, "-m", "serve.cli", "collect-env"]


def test_no_secret_of_the_environment_is_told() -> None:
    text = collect_env.as_text(collect_env.collect(SECRETS))
    assert "planted" not in text
    assert "OTEL" not in text  # what was not asked for is not even named


def test_a_private_variable_is_told_to_be_set_and_a_plain_one_with_its_value() -> None:
    environment = collect_env.collect({"HF_TOKEN": "x", "OMP_NUM_THREADS": "2"})["environment"]
    assert environment == {"OMP_NUM_THREADS": "2", "HF_TOKEN": "is set"}


def test_the_json_holds_versions_and_instructions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["torch"] == torch.__version__
    assert report["processor"]["instructions"] == torch.backends.cpu.get_cpu_capability()


def test_a_package_that_is_missing_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_PACKAGES", ("no-such-package-of-ours",))
    assert collect_env.collect({})["packages"] == {"no-such-package-of-ours": "not installed"}


def test_a_machine_without_a_compiler_is_reported_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_env.collect({})["system"]["compiler"] == "no c++"


def test_a_compiler_that_fails_is_reported_with_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect_env.collect({})["system"]["compiler"] == "c++ ended with code 3"


def test_every_card_that_the_driver_names_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'A, 1 MiB, 5'\necho 'B, 2 MiB, 5'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    graphics = collect_env.collect({})["graphics"]
    assert [graphics["device 0"], graphics["device 1"]] == ["A, 1 MiB, 5", "B, 2 MiB, 5"]


def test_in_a_terminal_it_prints_aligned_lines_and_no_secret() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(COMMAND, stdout=theirs, stderr=theirs, env=os.environ | SECRETS)
    os.close(theirs)
    seen = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert process.wait() == 0
    assert "planted" not in seen
    starts = [line.index(line.split("  ")[-1]) for line in seen.split("\r\n") if " GiB" in line]
    assert len(starts) >= 2
    assert len(set(starts[:2])) == 1


def _read(terminal: int) -> bytes:
    """What the terminal shows next; nothing once its other side is closed (EIO on Linux)."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
