"""The tensors of .gguf files: where each lies and what its bytes mean.

The `gguf` package knows the quantizations; it is imported where it is needed, so that serving
safetensors does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from serve.checkpoint.find import read_headers
from serve.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from serve.errors import ConfigError
from serve.kernels.stored import BLOCK_BYTES, Blocks, dequantize, dequantize_blocks

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType


_NUMBERS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place; `shape` in torch's order."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """What the headers of a model's files say, of which a split model has several."""

    path: Path  # of the first file
    files: tuple[Path, ...]
    settings: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_gguf_model(path: Path) -> GGUFModel:
    """`path` is the model's only file or its first part. Raises ConfigError for anything that is
    not a whole GGUF model."""
    headers = read_headers(path)
    return GGUFModel(
        path,
        tuple(header.path for header in headers),
        headers[0].settings,
        tuple(tensor for header in headers for tensor in _tensors(header)),
    )


def read_gguf_tensors(file: Path) -> list[GGUFTensor]:
    """The tensors of one file. Raises ConfigError."""
    return _tensors(read_gguf_header(file))


def load_tensor(tensor: GGUFTensor) -> Tensor:
    """A tensor's values in fp32."""
    stored = read_stored(tensor)
    return dequantize(stored) if isinstance(stored, Blocks) else stored.float()


def read_stored(tensor: GGUFTensor) -> Tensor | Blocks:
    """A tensor as it lies in the file's pages; of kinds of blocks that no kernels keep, its values
    in fp32."""
    # A private mapping may be written to, as torch wants it; nobody does.
    raw = np.memmap(tensor.file, np.uint8, "c", tensor.start, (tensor.num_bytes,))
    data, kind = torch.from_numpy(raw), tensor.kind.name
    if dtype := _NUMBERS.get(kind):
        return _aligned(data, dtype).view(dtype).view(tensor.shape)
    rows = data.view(math.prod(tensor.shape[:-1]), -1)
    if kind in BLOCK_BYTES and len(tensor.shape) == 2:
        return Blocks(kind, rows)
    try:
        return dequantize_blocks(rows, tensor.kind).view(tensor.shape)
    except NotImplementedError as error:
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name} is quantized as {kind}, which "
            "cannot be read; use a file of another quantization"
        ) from error


def _aligned(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Tensors begin where the file says, which need not be at a whole number."""
    return data if data.data_ptr() % dtype.itemsize == 0 else data.clone()


def _tensors(header: GGUFHeader) -> list[GGUFTensor]:
    """Raises ConfigError for sizes that cannot be, and for a file that ends before its tensors."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    size = header.path.stat().st_size
    tensors = []
    for entry in header.entries:
        try:
            kind = GGMLQuantizationType(entry.kind)
        except ValueError as error:
            raise ConfigError(
                f"{header.path}: not a readable GGUF file (tensor {entry.name!r}: {error}); "
                "download it again"
            ) from error
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        num_blocks, rest = divmod(math.prod(entry.shape), block_len)
        if rest or (entry.shape and entry.shape[-1] % block_len):
            raise ConfigError(
                f"{header.path}: not a readable GGUF file (tensor {entry.name!r} does not fill "
                "its blocks); download it again"
            )
        end = entry.start + num_blocks * block_bytes
        if end > size:
            raise ConfigError(
                f"{header.path}: the file is cut short ({size} bytes of {end}); download it again"
            )
        tensors.append(
            GGUFTensor(
                header.path, entry.name, entry.shape, kind, entry.start, num_blocks * block_bytes
            )
        )
    return tensors
