"""Checkpoints: a model's config and where its tensors come from, whatever the file format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from serve.checkpoint.find import find_gguf
from serve.errors import ConfigError
from serve.kernels.stored import Blocks, dequantize
from serve.models.weights import gguf_names, safetensors_files
from serve.models.weights.gguf_config import (
    GGUFConfig,
    as_transformers_config,
    make_gguf_config,
)
from serve.models.weights.gguf_file import read_gguf_model, read_gguf_tensors, read_stored
from serve.models.weights.model_config import read_config

Format = Literal["safetensors", "gguf", "dummy"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint: its config is read and its files are complete."""

    path: Path  # folder or .gguf file, of a split model the first
    format: Format
    hf_config: Any  # a transformers config object, or a GGUFConfig
    dtype: torch.dtype  # what the weights were published in
    files: tuple[Path, ...]  # empty for dummy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors under their Hugging Face names, one in memory at a time."""
        for file in self.files:
            yield from self.tensors_of(file)

    def for_transformers(self) -> Checkpoint:
        """The same with a config of transformers' own."""
        if not isinstance(self.hf_config, GGUFConfig):
            return self
        return replace(self, hf_config=as_transformers_config(self.hf_config))

    def tensor_names(self) -> set[str]:
        """Names of all tensors, read from the files' headers."""
        if self.format == "gguf":
            return {name for file in self.files for name in _gguf_names(file, self.hf_config)}
        return safetensors_files.read_names(self.files)

    def tensors_of(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one of `files`. GGUF's are dequantized to fp32."""
        for name, tensor in self.stored_in(file):
            values = tensor if isinstance(tensor, Tensor) else dequantize(tensor)
            yield name, values.float() if self.format == "gguf" else values

    def stored_in(self, file: Path) -> Iterator[tuple[str, Tensor | Blocks]]:
        """The same in the file's own pages: GGUF's blocks of kinds that kernels may keep, and
        numbers of any width; only other blocks are dequantized."""
        if self.format == "gguf":
            yield from _gguf_tensors(file, self.hf_config)
        else:
            yield from safetensors_files.read_tensors(file)


def open_checkpoint(path: Path, load_format: str) -> Checkpoint:
    """Find and check what a folder or .gguf file holds, without loading weights.

    `load_format` is the user's choice (`--load-format`); "dummy" needs the config only.
    Raises ConfigError: one line that names the file and what to do.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; give a model folder or a .gguf file")
    gguf_file = find_gguf(path, load_format)
    if gguf_file is not None:
        return _open_gguf(gguf_file, load_format)
    if load_format == "gguf":
        raise ConfigError(f"{path}: no .gguf file here, which --load-format gguf needs")
    if not path.is_dir():
        raise ConfigError(f"{path}: not a model; give a model folder or a .gguf file")
    config = read_config(path)
    files = () if load_format == "dummy" else safetensors_files.find_files(path)
    return Checkpoint(
        path=path,
        format="dummy" if load_format == "dummy" else "safetensors",
        hf_config=config,
        dtype=_config_dtype(config) or _first_dtype(files),
        files=files,
    )


def _open_gguf(file: Path, load_format: str) -> Checkpoint:
    model = read_gguf_model(file)
    kinds = {tensor.kind.name for tensor in model.tensors}
    model_type = gguf_names.model_type(file, model.settings)
    return Checkpoint(
        path=file,
        format="dummy" if load_format == "dummy" else "gguf",
        hf_config=make_gguf_config(file, model_type, gguf_names.config_values(model)),
        # Quantized weights have no dtype of their own; bfloat16 holds their range.
        dtype=torch.float16 if "F16" in kinds else torch.bfloat16,
        files=() if load_format == "dummy" else model.files,
    )


def _gguf_names(file: Path, config: Any) -> set[str]:
    return {gguf_names.hf_name(t.name, config.model_type) for t in read_gguf_tensors(file)}


def _gguf_tensors(file: Path, config: Any) -> Iterator[tuple[str, Tensor | Blocks]]:
    for tensor in read_gguf_tensors(file):
        if tensor.name == gguf_names.ROPE_DIVISORS:
            continue  # read into the config
        name = gguf_names.hf_name(tensor.name, config.model_type)
        stored = read_stored(tensor)
        if isinstance(stored, Blocks):
            yield name, Blocks(stored.form, gguf_names.hf_value(name, stored.data, config))
        else:
            yield name, gguf_names.hf_value(name, stored, config)


def _config_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _first_dtype(files: tuple[Path, ...]) -> torch.dtype:
    for file in files:
        for _, tensor in safetensors_files.read_tensors(file):
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.float32
