"""Several values for a flag make several command lines: `--max-num-seqs 8,64` is two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product

from serve.config import CacheConfig, SchedulerConfig

_TRUTH = {"true": "--", "on": "--", "false": "--no-", "off": "--no-"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One command line, and the flags that tell it from the others."""

    tokens: list[str]
    settings: dict[str, str]


def expand(tokens: Sequence[str]) -> list[Variant]:
    """Every combination of the values given to scheduler and cache flags.

    Values are separated by commas; a switch may be given as `--enable-chunked-prefill on,off`.
    Anything else stays as it is.
    """
    choices: list[list[tuple[list[str], dict[str, str]]]] = []
    rest = list(_split_equals(tokens))
    while rest:
        token = rest.pop(0)
        if token not in _FLAGS or not rest or rest[0].startswith("--"):
            choices.append([([token], {})])
            continue
        values = rest.pop(0).split(",")
        name = token.removeprefix("--")
        differ = len(values) > 1
        choices.append([(_spell(name, v), {name: v} if differ else {}) for v in values])
    return [_join(combination) for combination in product(*choices)]


def _spell(name: str, value: str) -> list[str]:
    """The tokens that give one value."""
    if f"--{name}" in _SWITCHES and value in _TRUTH:
        return [f"{_TRUTH[value]}{name}"]
    return [f"--{name}", value]


def _split_equals(tokens: Sequence[str]) -> list[str]:
    """`--flag=value` as two tokens."""
    apart = []
    for token in tokens:
        name, equals, value = token.partition("=")
        apart += [name, value] if name in _FLAGS and equals else [token]
    return apart


def _join(combination: Sequence[tuple[list[str], dict[str, str]]]) -> Variant:
    tokens = [token for part, _ in combination for token in part]
    settings = {name: value for _, part in combination for name, value in part.items()}
    return Variant(tokens, settings)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_FLAGS = frozenset(_flag(f.name) for c in (SchedulerConfig, CacheConfig) for f in fields(c))
_SWITCHES = frozenset(
    _flag(f.name) for c in (SchedulerConfig, CacheConfig) for f in fields(c) if f.type == "bool"
)
