"""GGUF headers written byte by byte, so that they can lie."""

from __future__ import annotations

import struct
from pathlib import Path

UINT8, UINT16, UINT32, STRING, ARRAY, UINT64 = 0, 2, 4, 8, 9, 10


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(key: str, kind: int, count: int, items: bytes) -> bytes:
    return setting(key, ARRAY, struct.pack("<IQ", kind, count) + items)


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    """`shape` in ggml's order."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def write(
    path: Path,
    settings: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    num_settings: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
) -> Path:
    """A file of these parts; the numbers are those of the parts unless they are given."""
    settings, tensors = settings or [], tensors or []
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(settings) if num_settings is None else num_settings,
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(settings) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def write_part(path: Path, number: int, count: int, *names: str, total: int | None = None) -> Path:
    """A part of a split model with small tensors of these names."""
    settings = [
        setting("split.no", UINT16, struct.pack("<H", number)),
        setting("split.count", UINT16, struct.pack("<H", count)),
    ]
    if total is not None:
        settings.append(setting("split.tensors.count", UINT32, struct.pack("<I", total)))
    return write(path, settings, [tensor(name, 8) for name in names], data=bytes(64))
