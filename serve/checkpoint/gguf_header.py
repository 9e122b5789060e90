"""The header of a .gguf file: its settings, and where its tensors lie.

Format: the GGUF v2/v3 specification of ggml. Needs neither torch nor the `gguf` package, whose
reader makes an array object per vocabulary entry and so takes many seconds for a real model. Arrays
are stepped over here and read when they are asked for, and what a file may claim is bounded, so
that a damaged or hostile one is refused in a moment.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from serve.errors import ConfigError

_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9

MAX_ENTRIES: Final = 1 << 16
"""Settings, and likewise tensors; real files have less than a tenth."""
MAX_TEXTS: Final = 1 << 21
"""In all arrays of texts together: large vocabularies with their merges have 0.8 million."""
MAX_BYTES: Final = 1 << 25
"""Of one text, or of an array that is read; vocabularies take a tenth."""
_MAX_DIMENSIONS: Final = 4  # ggml's


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in a header, not read yet."""

    path: Path
    key: str
    kind: int
    count: int
    start: int  # bytes from the beginning of the file
    end: int

    def __repr__(self) -> str:
        return f"an array of {self.count}"

    def read(self) -> list[Any]:
        """Its items. Raises ConfigError for an array that no model would have."""
        if self.end - self.start > MAX_BYTES:
            raise ConfigError(
                f"{self.path}: {self.key} takes {self.end - self.start} bytes; at most {MAX_BYTES} "
                "are read. Download the file again."
            )
        with _mapped(self.path) as data:
            reader = _Reader(data, self.path, self.start)
            if self.kind == _STRING:
                return [reader.text() for _ in range(self.count)]
            return list(reader.numbers(f"{self.count}{_SCALARS[self.kind]}"))


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """One tensor as the header describes it; `shape` in torch's order, `kind` by ggml's number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int  # bytes from the beginning of the file


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A checked header. A setting is a number, a text or a GGUFArray."""

    path: Path
    settings: Mapping[str, Any]
    entries: tuple[GGUFEntry, ...]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Raises ConfigError for a file that is not GGUF."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise ConfigError(f"{path}: not a file; download it again.")
    try:
        status = path.stat()
        return _read_header(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, ArithmeticError, KeyError, struct.error) as error:
        raise ConfigError(
            f"{path}: not a readable GGUF file ({error}); download it again."
        ) from error


@lru_cache(maxsize=4)
def _read_header(path: Path, mtime_ns: int, size: int) -> GGUFHeader:
    """Kept for as long as the file stays the same: a start asks for settings, vocabulary and
    tensors one by one, and stepping over the vocabulary takes tens of milliseconds."""
    with _mapped(path) as data:
        return _Reader(data, path).header()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _Reader:
    """Reads forward."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self._data = data
        self._path = path
        self._at = at
        self._num_texts = 0  # in arrays

    def header(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_settings = self.numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        if max(num_tensors, num_settings) > MAX_ENTRIES:
            raise ValueError(f"{num_tensors} tensors and {num_settings} settings are not possible")
        settings = dict(self._setting() for _ in range(num_settings))
        entries = [self._entry() for _ in range(num_tensors)]
        if len(settings) < num_settings or len({e.name for e in entries}) < num_tensors:
            raise ValueError("two settings or two tensors have the same name")
        alignment = settings.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = (GGUFEntry(e.name, e.shape, e.kind, start + e.start) for e in entries)
        return GGUFHeader(self._path, settings, tuple(placed))

    def text(self) -> str:
        (length,) = self.numbers("Q")
        if length > MAX_BYTES:
            raise ValueError(f"a text of {length} bytes is not possible")
        return self._take(length).decode("utf-8", "replace")

    def numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _setting(self) -> tuple[str, Any]:
        key = self.text()
        (kind,) = self.numbers("I")
        if kind == _ARRAY:
            return key, self._array(key)
        return key, self.text() if kind == _STRING else self.numbers(_scalar(kind))[0]

    def _array(self, key: str) -> GGUFArray:
        kind, count = self.numbers("IQ")
        start = self._at
        if kind == _STRING:
            self._skip_texts(key, count)
        else:
            self._at += count * struct.calcsize(f"<{_scalar(kind)}")
        if self._at > len(self._data):
            raise ValueError("it ends within its header")
        return GGUFArray(self._path, key, kind, count, start, self._at)

    def _skip_texts(self, key: str, count: int) -> None:
        self._num_texts += count
        if self._num_texts > MAX_TEXTS:
            raise ValueError(f"with {key} it has {self._num_texts} texts, at most {MAX_TEXTS}")
        data, at, length_at = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self._at = at

    def _entry(self) -> GGUFEntry:
        name = self.text()
        (num_dimensions,) = self.numbers("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = self.numbers(f"{num_dimensions}Q")[::-1]
        if 0 in shape:
            raise ValueError(f"tensor {name!r} has a dimension of 0")
        kind, offset = self.numbers("IQ")
        return GGUFEntry(name, shape, kind, offset)

    def _take(self, length: int) -> bytes:
        if self._at + length > len(self._data):
            raise ValueError("it ends within its header")
        self._at += length
        return self._data[self._at - length : self._at]


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of kind {kind} is not possible here")
    return _SCALARS[kind]
