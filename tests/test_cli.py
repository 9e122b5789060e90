"""The command line: flags from fields, file below flags, one line and exit code 2 for mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import serve.cli
from serve import __version__
from serve.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from serve.errors import ConfigError


class Started:
    """Stands where the server starts, and keeps what it was started with."""

    engine: EngineConfig
    server: ServerConfig

    def __call__(self, engine: EngineConfig, server: ServerConfig) -> int:
        self.engine, self.server = engine, server
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("serve.server.run_server", started)
    return started


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_without_flags_every_setting_has_its_default(started: Started) -> None:
    assert serve.cli.main(["serve"]) == 0
    assert (started.engine, started.server) == (EngineConfig(), ServerConfig())


def test_flags_reach_their_fields(started: Started) -> None:
    line = "serve my/model --port 0 --max-model-len 8k --no-enable-chunked-prefill"
    line += " --served-model-name a b --api-key k1 --api-key k2 --kv-cache-memory-bytes 2GiB"
    line += " --preemption-mode swap --scheduler-delay-factor 0.5 --device cpu"
    assert serve.cli.main(line.split()) == 0
    engine, server = started.engine, started.server
    assert engine.model == ModelConfig("my/model", max_model_len="8k")
    assert engine.cache.kv_cache_memory_bytes == 2 << 30
    assert engine.scheduler == SchedulerConfig(
        enable_chunked_prefill=False, preemption_mode="swap", scheduler_delay_factor=0.5
    )
    assert engine.device.device == "cpu"
    assert server == ServerConfig(port=0, served_model_name=("a", "b"), api_key=("k1", "k2"))


def test_the_file_beats_defaults_and_flags_beat_the_file(started: Started, yaml_file) -> None:
    path = yaml_file(
        "model: from/file\nport: 9000\napi-key: [a, b]\nserved_model_name: one\n"
        "enable-chunked-prefill: false\nmax-model-len: 4096\nblock-size: 32\n"
    )
    line = ["serve", "--config", path, "--port", "9001", "--api-key", "c"]
    assert serve.cli.main([*line, "--enable-chunked-prefill"]) == 0
    engine, server = started.engine, started.server
    assert (engine.model.model, engine.model.max_model_len) == ("from/file", "4096")
    assert engine.cache.block_size == 32
    assert engine.scheduler.enable_chunked_prefill
    assert server == ServerConfig(port=9001, api_key=("c",), served_model_name=("one",))


def test_model_on_the_line_beats_model_in_the_file(started: Started, yaml_file) -> None:
    assert serve.cli.main(["serve", "line", "--config", yaml_file("model: file")]) == 0
    assert started.engine.model.model == "line"


def test_an_empty_file_changes_nothing(started: Started, yaml_file) -> None:
    assert serve.cli.main(["serve", "--config", yaml_file("# nothing yet\n")]) == 0
    assert started.server == ServerConfig()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("serve --prot 1", "--prot. Did you mean --port?"),
        ("serve --port x", "--port"),
        ("serve --port 70000", "--port 70000 is not possible"),
        ("serve --dtype float64", "bfloat16"),
        ("serve --max-model-len many", "--max-model-len"),
        ("serve --kv-cache-memory-bytes 2Q", "--kv-cache-memory-bytes"),
        ("serve one two", "two"),
        ("serv", "serve"),
    ],
)
def test_a_wrong_line_is_one_line_and_exit_code_2(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.cli.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "prot"),
        ("port: x", "port"),
        ("dtype: float64", "dtype"),
        ("port: [", "not valid YAML"),
        ("- port", "flag: value"),
        ("1: port", "flag: value"),
        ("config: other.yaml", "another config file"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(
    text: str, says: str, yaml_file, capsys: pytest.CaptureFixture[str]
) -> None:
    path = yaml_file(text)
    assert serve.cli.main(["serve", "--config", path]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert path in printed
    assert says in printed


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.cli.main(["serve", "--config", "/no/such.yaml"]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err


def test_a_start_up_mistake_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(engine: EngineConfig, server: ServerConfig) -> int:
        raise ConfigError("there is no such model.\nPass another.")

    monkeypatch.setattr("serve.server.run_server", refuse)
    assert serve.cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "serve-llm: there is no such model. Pass another.\n"


def test_ctrl_c_while_loading_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(engine: EngineConfig, server: ServerConfig) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("serve.server.run_server", interrupted)
    assert serve.cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_help_shows_every_flag_with_its_no_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.cli.main(["serve", "--help"]) == 0
    page = capsys.readouterr().out
    configs: list[Any] = [ModelConfig, CacheConfig, SchedulerConfig, DeviceConfig, ServerConfig]
    for config in configs:
        for field in fields(config):
            flag = "--" + field.name.replace("_", "-")
            assert re.search(rf"{flag}\b", page), flag
            if field.type == "bool":
                assert "--no-" + flag[2:] in page
    assert "[default: 8000]" in page
    assert "[default: None]" not in page
    assert "[default: ()]" not in page
    assert "Scheduler" in page


def test_version_and_help_answer_and_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert serve.cli.main(["--help"]) == 0
    assert "serve-llm serve" in capsys.readouterr().out
    assert serve.cli.main([]) == 0


def test_the_version_is_told_without_reading_flags() -> None:
    """Whoever asks for it waits for nothing: the libraries that make flags are not imported."""
    code = "import sys; from serve.cli import main; main(['--version']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, modules = done.stdout.splitlines()
    assert version == __version__
    assert not {"cyclopts", "rich", "serve.config"} & set(modules.split())
