"""A recorded trace says what its engine was started with: that is what its replay starts with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.config import Count
from serve.engine.inspect.settings import settings_of
from serve.errors import ConfigError
from serve.simulate.settings import MachineConfig

_GIB = 1 << 30


def with_recorded_flags(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line of `simulate` and the flags that its workload's first line adds to it: those
    of the recorded engine that the line does not give itself. None for other workloads.

    Raises ConfigError for a first line that is no such engine.
    """
    path = _value(tokens, "--workload")
    engine = None if path is None else _engine_line(Path(path))
    if engine is None:
        return list(tokens), []
    try:
        recorded = _flags(engine, Count(_value(tokens, "--kv-bytes-per-token") or _KV_BYTES))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}, line 1: not what an engine writes ({error}).") from error
    given = {token.partition("=")[0].replace("--no-", "--", 1) for token in tokens}
    added = [
        token
        for flag, value in recorded.items()
        if f"--{flag}" not in given
        for token in _spell(flag, value)
    ]
    return [*tokens, *added], added


def _engine_line(path: Path) -> dict[str, Any] | None:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            line = json.loads(file.readline())
    except (OSError, ValueError):
        return None  # whoever reads the workload says what is wrong with it
    return line if isinstance(line, dict) and line.get("type") == "engine" else None


def _flags(engine: dict[str, Any], kv_bytes_per_token: int) -> dict[str, Any]:
    """Values by the flags that give them; None is left out."""
    limits, block_size = engine["limits"], engine["block_size"]
    host_bytes = (engine["num_host_blocks"] + 0.5) * block_size * kv_bytes_per_token
    flags = {
        "block-size": block_size,
        "num-gpu-blocks-override": engine["num_blocks"],
        "swap-space": host_bytes / _GIB if engine["num_host_blocks"] else 0,
        "enable-prefix-caching": engine["enable_prefix_caching"],
        "context-len": limits["max_model_len"],
        **{name.replace("_", "-"): value for name, value in settings_of(limits).items()},
    }
    return {flag: value for flag, value in flags.items() if value is not None}


def _spell(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _value(tokens: Sequence[str], flag: str) -> str | None:
    """What the last such flag is followed by."""
    found = None
    for i, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name == flag:
            found = value if equals else next(iter(tokens[i + 1 : i + 2]), None)
    return found


_KV_BYTES = MachineConfig().kv_bytes_per_token
