"""Where the server's keys come from: flags, the environment, and files.

They are never logged, and no message repeats one.
"""

from __future__ import annotations

import logging
import stat
from dataclasses import replace
from pathlib import Path

from serve.config import ServerConfig, api_keys_from_environment
from serve.errors import ConfigError
from serve.settings_file import read_bytes

logger = logging.getLogger(__name__)


def with_all_keys(config: ServerConfig) -> ServerConfig:
    """The settings with every key in `api_key` and `admin_api_key`. Raises ConfigError."""
    keys = [*config.api_key, *api_keys_from_environment()]
    keys += read_keys(config.api_key_file, "--api-key-file")
    admin_keys = [*config.admin_api_key]
    admin_keys += read_keys(config.admin_api_key_file, "--admin-api-key-file")
    for flag, given in (("--api-key", keys), ("--admin-api-key", admin_keys)):
        if not all(given):
            raise ConfigError(f"{flag}: a key is empty, so that everybody would have it.")
    if set(keys) & set(admin_keys):
        raise ConfigError(
            "--admin-api-key: an admin key is also an ordinary one, so that every client who has "
            "it controls the server. Use keys of their own."
        )
    return replace(
        config,
        api_key=tuple(dict.fromkeys(keys)),
        admin_api_key=tuple(dict.fromkeys(admin_keys)),
    )


def read_keys(name: str | None, flag: str) -> list[str]:
    """The keys in a file, one per line. Raises ConfigError."""
    if name is None:
        return []
    path = Path(name).expanduser()
    try:
        lines = read_bytes(path, flag).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: is not text in UTF-8.") from None
    stripped = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {n: line for n, line in stripped.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if not key.isprintable() or " " in key:
            raise ConfigError(
                f"{flag} {path}: line {number} has spaces or control characters within a key, "
                "which no client can send. Write one key per line."
            )
    if not keys:
        raise ConfigError(f"{flag} {path}: holds no key. Write one per line, or drop the flag.")
    _warn_of_readers(path, flag)
    return list(keys.values())


def _warn_of_readers(path: Path, flag: str) -> None:
    """Only a warning: secrets that an orchestrator mounts are often readable by all."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "%s %s: other users of this machine may read or change it (mode %o); chmod 600 it",
            flag,
            path,
            stat.S_IMODE(mode),
        )
