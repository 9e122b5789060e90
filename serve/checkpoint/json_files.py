"""A checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from serve.errors import ConfigError

MAX_BYTES: Final = 1 << 26
"""Of a file; the largest there are, indexes of models with many experts, take a fifth of it."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file. Raises ConfigError for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return value


def read_text(path: Path) -> str:
    """A text file of a model. Raises ConfigError for one that is no file, no UTF-8 or too large."""
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ConfigError(f"{path} is not a file; fetch it again.")
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes, at most {MAX_BYTES} are read.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch it again.") from error
