"""A GGUF file's header: its settings and where its tensors lie.

The `gguf` package's own reader makes an array object per vocabulary entry, which takes seconds for
a real model; this one steps over the vocabulary. Format: the GGUF v2/v3 specification of ggml.
The package knows the quantizations; it is imported where it is needed, so that serving safetensors
does not need it.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from serve.errors import ConfigError

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file; `shape` in torch's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file; use as a context manager.

    `settings` holds the key-values; an array of strings is represented by its length alone.
    Raises ConfigError for anything that is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # mmap refuses empty files
                raise ConfigError(f"{path}: the file is empty; download it again") from error
        try:
            self.settings, self.tensors = _Header(self._bytes).read()
        except (struct.error, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            self._bytes.close()
            raise ConfigError(
                f"{path}: not a readable GGUF file ({error}); download it again"
            ) from error
        end = max((t.start + t.num_bytes for t in self.tensors), default=0)
        if end > (size := len(self._bytes)):
            self._bytes.close()
            raise ConfigError(
                f"{path}: the file is cut short ({size} bytes of {end}); download it again"
            )

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bytes.close()

    def load(self, tensor: GGUFTensor) -> Tensor:
        """A tensor's values, dequantized to fp32."""
        from gguf.quants import dequantize

        raw = np.frombuffer(
            self._bytes[tensor.start : tensor.start + tensor.num_bytes], dtype=np.uint8
        )
        values: np.ndarray[Any, np.dtype[np.float32]]
        if tensor.kind.name == "F32":
            values = raw.view(np.float32)
        elif tensor.kind.name == "F16":
            values = raw.view(np.float16).astype(np.float32)
        else:
            try:
                values = dequantize(_long_rows(raw, math.prod(tensor.shape[:-1])), tensor.kind)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self.path}: tensor {tensor.name} is quantized as {tensor.kind.name}, which "
                    "cannot be read; use a file of another quantization"
                ) from error
        # torch wants memory it may write to, and a view of the file is not.
        return torch.from_numpy(np.require(values, requirements="W")).view(tensor.shape)


def _long_rows(raw: np.ndarray[Any, np.dtype[np.uint8]], num_rows: int) -> np.ndarray[Any, Any]:
    """A tensor's bytes in rows of whole blocks. The package works through 16 rows at a time, so
    neighbours are joined into rows of up to 32 KiB: 0.7 s instead of 1.6 for the default model."""
    while num_rows % 2 == 0 and 2 * raw.size // num_rows <= 2**15:
        num_rows //= 2
    return raw.reshape(num_rows, -1)


class _Header:
    """Reads forward through the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], list[GGUFTensor]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        num_tensors, num_settings = self._scalar("<Q"), self._scalar("<Q")
        settings = {self._string(): self._value(self._scalar("<I")) for _ in range(num_settings)}
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return settings, [
            GGUFTensor(name, shape, kind, start + offset, _num_bytes(name, shape, kind))
            for name, shape, kind, offset in entries
        ]

    def _entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        from gguf.constants import GGMLQuantizationType

        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
        kind = GGMLQuantizationType(self._scalar("<I"))
        return name, shape[::-1], kind, self._scalar("<Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, count = self._scalar("<I"), self._scalar("<Q")
        if item_kind != _STRING:
            return [self._value(item_kind) for _ in range(count)]
        for _ in range(count):
            self._at += 8 + struct.unpack_from("<Q", self._data, self._at)[0]
        return count

    def _string(self) -> str:
        length = self._scalar("<Q")
        if self._at + length > len(self._data):
            raise ValueError("it ends within its header")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value


def _num_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    count = math.prod(shape)
    if count % block_len:
        raise ValueError(f"tensor {name} does not fill its blocks")
    return count // block_len * block_bytes
