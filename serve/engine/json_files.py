"""A checkpoint's small JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file. Raises ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); fetch it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return value
