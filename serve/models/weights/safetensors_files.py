"""The safetensors files of a model folder, found and checked before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.checkpoint.json_files import read_text
from serve.errors import ConfigError

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def find_files(folder: Path) -> tuple[Path, ...]:
    """The folder's weight files, each complete by its own header. Raises ConfigError."""
    if (folder / _SINGLE).exists():
        files = [folder / _SINGLE]
        if (folder / _INDEX).exists():
            logger.warning(
                "%s: %s is read, as transformers does, and not the files of %s beside it; remove "
                "what does not belong to the model",
                folder,
                _SINGLE,
                _INDEX,
            )
    elif (folder / _INDEX).exists():
        files = _files_of_index(folder / _INDEX)
    else:
        raise ConfigError(f"{folder}: {_no_weights(folder)}")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: not a file; download it again")
        for _ in _open(file):
            pass
    return tuple(files)


def read_names(files: Iterable[Path]) -> set[str]:
    """Names of all tensors in files, from their headers."""
    return {name for file in files for opened in _open(file) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file in the file's order, one in memory at a time."""
    for opened in _open(file):
        for name in opened.offset_keys():
            yield name, opened.get_tensor(name)


def read_matching(
    files: Iterable[Path], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors with these names; no others are read."""
    for file in files:
        for opened in _open(file):
            for name in filter(wanted, opened.keys()):
                yield name, opened.get_tensor(name)


def _open(file: Path) -> Iterator[Any]:
    """The opened file, once, with safetensors' complaints turned into ours."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file}: not a whole safetensors file ({error}); download it again"
        ) from error


def _files_of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("file names must be text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{index}: not a readable index ({error!r}); download it again"
        ) from error
    for name in names:
        if not _is_inside(name):
            raise ConfigError(
                f"{index}: it names {name[:200]!r}, which is not a file of its folder; download "
                "it again"
            )
        if not os.path.exists(index.parent / name):
            raise ConfigError(
                f"{index.parent / name}: the file is missing although {_INDEX} names it; "
                "download it again"
            )
    return [index.parent / name for name in names]


def _is_inside(name: str) -> bool:
    """Whether it names something below the folder. A link there may lead anywhere, as in a hub
    cache."""
    path = PurePath(name)
    is_name = name.isprintable() and len(name) < 256
    return is_name and not path.is_absolute() and ".." not in path.parts


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"the folder has neither {_SINGLE} nor {_INDEX}; download the missing file"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return (
            "the folder has pickled weights only, which may run code when they are opened; "
            "convert the model to safetensors"
        )
    return f"the folder has no weights ({_SINGLE} or {_INDEX}); download the model again"
