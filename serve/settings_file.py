"""Files of settings: whatever is wrong with one is a sentence that names its flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serve.errors import ConfigError

MAX_BYTES = 4 * 2**20


def read_bytes(path: Path, flag: str) -> bytes:
    """All that a file of settings holds. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror}).") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{flag} {path}: has more than {MAX_BYTES} bytes.")
    return raw


def read_yaml(path: Path, flag: str) -> Any:
    """What a YAML file holds; None if that is nothing. Raises ConfigError."""
    raw = read_bytes(path, flag)
    try:
        return yaml.safe_load(raw.decode("utf-8"))
    except RecursionError:  # its own lines would be a thousand
        raise ConfigError(f"{flag} {path}: is nested too deeply.") from None
    except Exception as error:  # a bad number or date raises whatever its parsing raises
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {path}: is not valid YAML ({reason}).") from error
