"""The key-values of a .gguf file: where its vocabulary, merges and chat template are.

Format: the GGUF v2/v3 specification of ggml. Needs neither torch nor the `gguf` package, whose
reader makes an array object per vocabulary entry and so takes many seconds for a real model.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, Final

from serve.errors import ConfigError

_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9


def find_gguf(path: Path) -> Path | None:
    """The .gguf file that `path` is, or the only one in a folder without config.json.

    Raises ConfigError for a folder that holds several, or nothing that a model or a tokenizer alone
    would have.
    """
    if not path.is_dir():
        return path
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if not files and not any(path.glob("*.json")) and not any(path.glob("*.model")):
        raise ConfigError(f"{path}: neither config.json nor a .gguf file is here; not a model.")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path}: several .gguf files ({names}); name the one to serve.")
    return files[0] if files else None


def read_gguf_settings(path: Path) -> dict[str, Any]:
    """Key → number, string or list. Raises ConfigError for a file that is not GGUF."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data).settings()
    except (OSError, ValueError, KeyError, struct.error, RecursionError) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error}); fetch it again.") from error


class _Reader:
    """Reads forward through the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def settings(self) -> dict[str, Any]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, _, num_settings = self._numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        return {self._string(): self._value(*self._numbers("I")) for _ in range(num_settings)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_SCALARS[kind])[0]
        item_kind, count = self._numbers("IQ")
        if item_kind in _SCALARS:
            return list(self._numbers(f"{count}{_SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        return self._take(length).decode("utf-8", "replace")

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _take(self, length: int) -> bytes:
        if self._at + length > len(self._data):
            raise ValueError("it ends within its header")
        self._at += length
        return self._data[self._at - length : self._at]
