"""A checkpoint's JSON files, whole and broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve.checkpoint import json_files
from serve.errors import ConfigError


def test_an_object_is_read_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"é": [1]}', "utf-8")
    assert json_files.read_json_object(tmp_path / "a.json") == {"é": [1]}
    assert json_files.read_json_object(tmp_path / "b.json") == {}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not readable JSON"),
        (b"{", "not readable JSON"),
        (b"[" * 100_000, "not readable JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not readable JSON"),
        (b"[1]", "must hold a JSON object"),
        (b'{"a": "\xff"}', "cannot be read"),
    ],
)
def test_sec_51_what_is_no_object_is_one_line(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        json_files.read_json_object(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sec_51_a_huge_file_and_a_pipe_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "huge.json").touch()
    os.truncate(tmp_path / "huge.json", json_files.MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="at most 67108864 are read"):
        json_files.read_json_object(tmp_path / "huge.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match="is not a file"):
        json_files.read_json_object(tmp_path / "pipe.json")
