"""Which .gguf files a path means: one, or all parts of a model that was split into several.

Splitting is llama.cpp's convention (llama-gguf-split): the parts are NAME-00001-of-00003.gguf and
so on, the first has all settings, and each says which part it is. A model is named by its first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from serve.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from serve.errors import ConfigError

_PART_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MERGE: Final = "merge the parts with llama-gguf-split --merge"


def find_gguf(path: Path, load_format: str = "auto") -> Path | None:
    """The .gguf file that `path` means, of a split model its first part; None for other models.

    In a folder it is the only model of this kind, and without --load-format gguf a config.json
    comes first. Raises ConfigError for a folder that holds several, or nothing of a model at all.
    """
    if not path.is_dir():
        return _gguf_file(path, load_format)
    if load_format == "safetensors" or (load_format != "gguf" and (path / "config.json").exists()):
        return None
    found = sorted({_first_part(file) for file in path.glob("*.gguf")})
    if not found and not any(path.glob("*.json")) and not any(path.glob("*.model")):
        raise ConfigError(f"{path}: neither config.json nor a .gguf file is here; not a model.")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"{path}: several .gguf files ({names}); name the one to serve.")
    if found and not found[0].exists():
        raise ConfigError(f"{found[0]}: the first part of the model is missing; download it too.")
    return found[0] if found else None


def read_first_header(path: Path) -> GGUFHeader:
    """The header with the settings. Raises ConfigError for a later part, naming the first."""
    header = read_gguf_header(path)
    number, count = _place(header)
    if number > 0:
        named = _PART_NAME.fullmatch(path.name)
        which = f", {_part_name(named['stem'], 1, count)}" if named else ""
        raise ConfigError(
            f"{path}: this is part {number + 1} of {count} of a model; name its first part{which}."
        )
    return header


def read_headers(path: Path) -> tuple[GGUFHeader, ...]:
    """The headers of all parts, in order; most models have one.

    Raises ConfigError, naming the file, for a part that is missing, out of order or there twice.
    """
    first = read_first_header(path)
    _, count = _place(first)
    others = [_read_part(file, i, count) for i, file in enumerate(_later_parts(path, count), 1)]
    seen: dict[str, Path] = {}
    for header in (first, *others):
        for entry in header.entries:
            if entry.name in seen:
                raise ConfigError(
                    f"{header.path}: tensor {entry.name!r} is in {seen[entry.name].name} too; "
                    "download the parts again."
                )
            seen[entry.name] = header.path
    total = first.settings.get("split.tensors.count", len(seen))
    if count > 1 and total != len(seen):
        raise ConfigError(
            f"{path}: the parts hold {len(seen)} tensors of {total}; download them again."
        )
    return (first, *others)


def _gguf_file(path: Path, load_format: str) -> Path | None:
    if path.suffix.lower() != ".gguf":
        return None
    if load_format == "safetensors":
        raise ConfigError(f"{path}: a .gguf file, but --load-format asks for safetensors.")
    return path


def _first_part(file: Path) -> Path:
    """The file that stands for a model in a folder: a later part's is the first one."""
    named = _PART_NAME.fullmatch(file.name)
    if named is None:
        return file
    return file.with_name(_part_name(named["stem"], 1, int(named["count"])))


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def _place(header: GGUFHeader) -> tuple[int, int]:
    """Which part of how many, counted from 0, by the header's word."""
    number, count = (header.settings.get(f"split.{key}") for key in ("no", "count"))
    if number is None and count in (None, 0):
        return 0, 1
    number = 0 if number is None else number
    if type(number) is not int or type(count) is not int or not 0 <= number < max(count, 1):
        raise ConfigError(
            f"{header.path}: its split.no is {number!r} and its split.count {count!r}, which "
            "cannot be; download it again."
        )
    return number, max(count, 1)


def _later_parts(path: Path, count: int) -> list[Path]:
    if count == 1:
        return []
    named = _PART_NAME.fullmatch(path.name)
    if named is None or (int(named["number"]), int(named["count"])) != (1, count):
        raise ConfigError(
            f"{path}: this is the first of {count} parts, and the others are found by its name, "
            f"which must end in {_part_name('', 1, count)}; rename the parts, or {_MERGE}."
        )
    files = [path.with_name(_part_name(named["stem"], i, count)) for i in range(2, count + 1)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        others = f" and {len(missing) - 1} more parts are" if len(missing) > 1 else " is"
        raise ConfigError(
            f"{path.with_name(missing[0])}: this part{others} missing beside {path.name}; "
            "download what is missing into the same folder."
        )
    return files


def _read_part(file: Path, number: int, count: int) -> GGUFHeader:
    header = read_gguf_header(file)
    found = _place(header)
    if found != (number, count):
        raise ConfigError(
            f"{file}: by its header this is part {found[0] + 1} of {found[1]}, by its name part "
            f"{number + 1} of {count}; download the parts again under their own names."
        )
    return header
