"""GGUF headers that lie are refused in a moment, in one line that names the file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from serve.checkpoint.gguf_header import MAX_BYTES, MAX_TEXTS, GGUFArray, read_gguf_header
from serve.errors import ConfigError
from tests.checkpoint.gguf_bytes import (
    ARRAY,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    array,
    setting,
    tensor,
    text,
    write,
)

HUGE = 2**62


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError, match="not a readable GGUF file") as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_numbers_texts_and_arrays_are_what_was_written(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        [
            setting("a", UINT32, struct.pack("<I", 7)),
            setting("b", STRING, text("héllo")),
            array("c", UINT8, 3, bytes([1, 2, 3])),
            array("d", STRING, 2, text("x") + text("")),
            array("e", STRING, 0, b""),
        ],
        [tensor("t", 4, 2, offset=32), tensor("scalar")],
    )

    header = read_gguf_header(path)

    arrays = {k: v.read() for k, v in header.settings.items() if isinstance(v, GGUFArray)}
    assert arrays == {"c": [1, 2, 3], "d": ["x", ""], "e": []}
    assert (header.settings["a"], header.settings["b"]) == (7, "héllo")
    assert [(e.name, e.shape) for e in header.entries] == [("t", (2, 4)), ("scalar", ())]
    first, second = header.entries
    assert first.start == second.start + 32 == path.stat().st_size + 32


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ([], [tensor("t", 8, 0)], "'t' has a dimension of 0"),
        ([], [tensor("t", 0)], "'t' has a dimension of 0"),
        ([], [tensor("t", 1, 1, 1, 1, 1)], "5 dimensions"),
        ([], [text("t") + struct.pack("<I", 2**31)], "dimensions"),
        ([], [tensor("t", 8), tensor("t", 8)], "the same name"),
        ([setting("k", UINT8, b"1")] * 2, [], "the same name"),
        ([setting("k", 77, b"")], [], "kind 77"),
        ([array("k", 77, 1, b"")], [], "kind 77"),
        ([array("k", ARRAY, 1, struct.pack("<IQ", UINT8, 0))], [], "kind 9"),
        ([array("k", UINT8, HUGE, b"")], [], "ends within its header"),
        ([array("k", UINT64, HUGE, b"")], [], "ends within its header"),
        ([array("k", STRING, HUGE, b"")], [], f"at most {MAX_TEXTS}"),
        ([array("k", STRING, 2, struct.pack("<Q", HUGE))], [], ""),
        ([array("k", STRING, 1, struct.pack("<Q", HUGE))], [], "ends within its header"),
        ([setting("k", STRING, struct.pack("<Q", HUGE))], [], "a text of"),
        ([struct.pack("<Q", 2**64 - 1)], [], "a text of"),
        ([setting("general.alignment", UINT32, bytes(4))], [], "general.alignment is 0"),
        ([setting("general.alignment", STRING, text("x"))], [], "general.alignment is 'x'"),
    ],
)
def test_sec_51_what_cannot_be_is_refused(
    tmp_path: Path, settings: list[bytes], tensors: list[bytes], reason: str
) -> None:
    assert reason in refusal(write(tmp_path / "m.gguf", settings, tensors))


@pytest.mark.parametrize("counts", [{"num_settings": HUGE}, {"num_tensors": HUGE}])
def test_sec_51_counts_beyond_reason_are_refused(tmp_path: Path, counts: dict[str, int]) -> None:
    assert "not possible" in refusal(write(tmp_path / "m.gguf", **counts))


def test_sec_51_hundreds_of_megabytes_of_arrays_are_stepped_over_or_refused(
    tmp_path: Path,
) -> None:
    """300 MB of small numbers are one step; as many empty texts are refused by their number."""
    numbers = write(tmp_path / "numbers.gguf", [array("k", UINT8, 300_000_000, b"")])
    os.truncate(numbers, 300_000_100)
    texts = write(tmp_path / "texts.gguf", [array("k", STRING, 37_000_000, b"")])
    os.truncate(texts, 300_000_100)

    found = read_gguf_header(numbers).settings["k"]
    with pytest.raises(ConfigError, match=f"k takes 300000000 bytes; at most {MAX_BYTES}"):
        found.read()
    assert "has 37000000 texts" in refusal(texts)


def test_sec_51_texts_in_many_arrays_count_together(tmp_path: Path) -> None:
    many = [array(f"k{i}", STRING, MAX_TEXTS // 2, bytes(4 * MAX_TEXTS)) for i in range(3)]
    assert f"it has {3 * MAX_TEXTS // 2} texts" in refusal(write(tmp_path / "m.gguf", many))


@pytest.mark.parametrize("cut", [0, 3, 10, 30, 45])
def test_ops_13_a_cut_or_missing_file_is_a_config_error(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "m.gguf", [array("k", STRING, 2, text("ab") + text("cd"))])
    path.write_bytes(path.read_bytes()[:cut])
    refusal(path)
    refusal(tmp_path / "missing.gguf")


def test_ops_13_a_pipe_or_a_folder_called_gguf_is_no_file(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever for somebody to write to it."""
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf"):
        with pytest.raises(ConfigError, match=f"{name}: not a file"):
            read_gguf_header(tmp_path / name)
