"""Keys from flags, the environment and files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from serve.api.clients.keys import read_keys, with_all_keys
from serve.config import ServerConfig
from serve.errors import ConfigError


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# team a\nplanted-one\n\n  schlüssel-zwei \n#planted-old\n")
    path.chmod(0o600)
    return path


def test_keys_of_all_sources_count_once_each(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SERVE_LLM_API_KEY", "from-environment, planted-one")
    config = ServerConfig(
        api_key=("from-flag",), api_key_file=str(key_file), admin_api_key=("planted-admin",)
    )
    config = with_all_keys(config)
    assert config.api_key == ("from-flag", "from-environment", "planted-one", "schlüssel-zwei")
    assert config.admin_api_key == ("planted-admin",)
    assert "planted" not in repr(config)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# nothing\n\n", "holds no key"),
        (b"good\nplanted key\n", "line 2 has spaces"),
        (b"planted\x00key", "line 1 has spaces or control"),
        (b"planted\xff", "not text in UTF-8"),
    ],
)
def test_a_bad_file_is_told_by_flag_and_line_and_never_by_content(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--api-key-file .*{message}") as told:
        read_keys(str(path), "--api-key-file")
    assert "planted" not in str(told.value)


def test_a_file_that_is_not_there_is_told_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--admin-api-key-file .*cannot be read"):
        with_all_keys(ServerConfig(admin_api_key_file=str(tmp_path / "none")))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_read_or_change_is_warned_of(
    mode: int, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert len(read_keys(str(key_file), "--api-key-file")) == 2
    assert f"mode {mode:o}" in caplog.text
    assert "chmod 600" in caplog.text
    assert "planted" not in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(api_key=("planted",), admin_api_key=("other", "planted")),
        ServerConfig(api_key=("",)),
        ServerConfig(admin_api_key=("planted", "")),
    ],
)
def test_keys_that_protect_nothing_are_refused(config: ServerConfig) -> None:
    with pytest.raises(ConfigError, match="-api-key: ") as told:
        with_all_keys(config)
    assert "planted" not in str(told.value)
