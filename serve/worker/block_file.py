"""KV blocks in a safetensors file, with what they must fit to be of use.

Written piece by piece, so that saving needs no second copy of the cache in memory, under another
name until it is complete. Each tensor has a checksum: safetensors itself only checks sizes.
Format: https://github.com/huggingface/safetensors (8 bytes length, JSON header, data).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.kv_cache.storage import KVStorage
from serve.worker.executor import BlocksUnusable

HASH_BYTES = 32
_HASHES = "hashes"
_NO_CHECKSUM = "0" * 8
_DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.uint8: "U8",
    }
)


class BlockFile:
    """Device blocks out to a file and back. Writes `storage` between steps only.

    `identity` is what a file's blocks must have in common with ours, by name.
    """

    def __init__(
        self, storage: KVStorage, identity: Mapping[str, str], synchronize: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._identity = identity
        self._synchronize = synchronize

    def write(self, path: Path, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Write the device blocks of all layers, and their hashes; the file's size in bytes.

        The file is replaced when the new one is complete, or not at all. Raises OSError.
        """
        self._synchronize()
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            with open(unfinished, "wb", opener=_for_us_alone) as file:
                size = _write(file, self._storage, hashes, block_ids, self._identity)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return size

    def read_hashes(self, path: Path) -> list[bytes]:
        """The hashes of a file's blocks, most wanted first. Raises BlocksUnusable, also when they
        are of another model, dtype, block size or layout."""
        with _open(path) as file:
            metadata = file.metadata() or {}
            for name, wanted in self._identity.items():
                if metadata.get(name) != wanted:
                    raise BlocksUnusable(f"its {name} is {metadata.get(name)}, not {wanted}")
            packed = _checked(file, _HASHES, metadata)
            if packed.dim() != 2 or packed.shape[1] != HASH_BYTES:
                raise BlocksUnusable("its hashes have another length")
            for name, layer in _layers(self._storage):
                shape = [layer.shape[0], packed.shape[0], *layer.shape[2:]]
                if _shape(file, name) != shape:
                    raise BlocksUnusable(f"the shape of {name} is not {shape}")
        return [row.tobytes() for row in packed.numpy()]

    def read(self, path: Path, block_ids: Sequence[int]) -> None:
        """Fill device blocks with the first ones of a file whose hashes were read.

        Raises BlocksUnusable when it has changed since.
        """
        with _open(path) as file:
            for name, layer in _layers(self._storage):
                saved = _checked(file, name, file.metadata() or {})
                chosen = _as_bytes(saved[:, : len(block_ids)]).to(layer.device)
                _as_bytes(layer)[:, list(block_ids)] = chosen
        self._synchronize()


def _for_us_alone(path: str, flags: int) -> int:
    """What clients said can be read from their keys and values."""
    return os.open(path, flags, 0o600)


def _layers(storage: KVStorage) -> Iterator[tuple[str, Tensor]]:
    for number, layer in enumerate(storage.layers):
        yield f"layers.{number}", layer


def _as_bytes(tensor: Tensor) -> Tensor:
    """Copying by index is not implemented for every dtype, but for this one."""
    return tensor.view(torch.uint8)


def _write(
    file: BinaryIO,
    storage: KVStorage,
    hashes: Sequence[bytes],
    block_ids: Sequence[int],
    identity: Mapping[str, str],
) -> int:
    packed = torch.frombuffer(bytearray(b"".join(hashes)), dtype=torch.uint8)
    packed = packed.view(len(hashes), HASH_BYTES)
    shapes = {_HASHES: (tuple(packed.shape), packed.dtype)}
    for name, layer in _layers(storage):
        shapes[name] = ((layer.shape[0], len(block_ids), *layer.shape[2:]), layer.dtype)
    checksums = dict.fromkeys(shapes, _NO_CHECKSUM)  # as long as those that take their place
    file.write(_header(shapes, identity, checksums))
    checksums[_HASHES] = _append(file, packed)
    ids = torch.tensor(list(block_ids), dtype=torch.int64)
    for name, layer in _layers(storage):
        chosen = _as_bytes(layer).index_select(1, ids.to(layer.device))
        checksums[name] = _append(file, chosen.cpu())
    size = file.tell()
    file.seek(0)
    file.write(_header(shapes, identity, checksums))
    return size


def _append(file: BinaryIO, tensor: Tensor) -> str:
    """Write a tensor's bytes; their checksum."""
    data = _as_bytes(tensor.contiguous()).reshape(-1).numpy().data
    file.write(data)
    return _checksum(data)


def _header(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    identity: Mapping[str, str],
    checksums: Mapping[str, str],
) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {**identity, **{f"crc32 {k}": v for k, v in checksums.items()}}
    }
    start = 0
    for name, (shape, dtype) in shapes.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BlocksUnusable(f"it cannot be read: {error}") from error


def _shape(file: safe_open, name: str) -> list[int]:
    try:
        shape: list[int] = file.get_slice(name).get_shape()  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise BlocksUnusable(f"it has no {name}: {error}") from error
    return shape


def _checked(file: safe_open, name: str, metadata: Mapping[str, str]) -> Tensor:
    """One tensor, whose bytes are those that were written."""
    try:
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise BlocksUnusable(f"it has no {name}: {error}") from error
    if metadata.get(f"crc32 {name}") != _checksum(_as_bytes(tensor).reshape(-1).numpy().data):
        raise BlocksUnusable(f"{name} is damaged")
    return tensor


def _checksum(view: memoryview) -> str:
    return f"{zlib.crc32(view):08x}"
