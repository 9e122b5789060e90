"""How the fields of a config dataclass appear as flags, for every command."""

from __future__ import annotations

from typing import Any

from cyclopts import Group, Parameter


def flags(title: str, order: int) -> Parameter:
    """One config dataclass on the command line: its fields, flat, under a heading."""
    return Parameter(
        name="*",
        group=Group(title, sort_key=order),
        consume_multiple=True,
        negative_iterable=(),
        show_default=_as_typed,
    )


def _as_typed(default: Any) -> str | None:
    """A flag's default as one would type it; None, which --help leaves out, for none."""
    if default is None or default == ():
        return None
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
