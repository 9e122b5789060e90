"""`serve-llm plan` from the command line to its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.cli import main
from tests.tiny_models import make_config, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_config("mistral").save_pretrained(tmp_path)
    return tmp_path


def test_a_config_json_alone_is_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", str(folder / "config.json"), "--memory", "2GiB", "--lengths", "16", "64"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    for text in (
        "mistral",
        "weights in float32",
        "KV per token",
        "requests at once",
        "they see 5 tokens",
    ):
        assert text in printed, printed


def test_weights_narrower_than_their_dtype_are_explained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    make_config("mistral", dtype="bfloat16").save_pretrained(half)
    assert main(["plan", str(half), "--device", "cpu", "--memory", "2GiB"]) == 0
    assert "kept in 16 bits, like in the file" in " ".join(capsys.readouterr().out.split())
    for plain in ([str(folder), "--device", "cpu"], [str(half), "--device", "cuda"]):
        assert main(["plan", *plain, "--memory", "2GiB"]) == 0
        assert "kept in" not in capsys.readouterr().out


def test_json_has_the_same_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--memory", "2GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["kv_bytes_per_token"] == 3 * 2 * 2 * 8 * 4
    assert plan["memory_bytes"] == 2 << 30
    assert plan["fits"][-1]["length"] == 64
    assert plan["cache"]["num_blocks"] > 0


def test_a_model_that_does_not_fit_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--memory", "1MiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_folder_with_weights_plans_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path, "mistral")
    (alone := tmp_path / "alone").mkdir()
    make_config("mistral", dtype="float32").save_pretrained(alone)
    plans = []
    for folder in (tmp_path, alone):
        assert main(["plan", str(folder), "--memory", "2GiB", "--json"]) == 0
        plans.append({**json.loads(capsys.readouterr().out), "model": ""})
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        (["/no/such/folder"], "/no/such/folder", 1),
        (["--memory", "0"], "--memory 0", 2),
        (["--memory", "lots"], "--memory", 2),
    ],
)
def test_a_wrong_line_says_what_is_wrong(
    flags: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags]) == code
    assert says in capsys.readouterr().err
