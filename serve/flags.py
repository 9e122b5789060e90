"""How the fields of a config dataclass appear as flags, for every command."""

from __future__ import annotations

from typing import Any

from cyclopts import Group, Parameter
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer

# A third of 80 columns, cyclopts' own choice, would break the longest flag in two.
_NAMES = ColumnSpec(renderer=NameRenderer(max_width=34), max_width=34, style="cyclopts.name")
HELP_PAGE = DefaultFormatter(column_specs=(_NAMES, ColumnSpec(renderer=DescriptionRenderer())))
"""How a command's --help is laid out."""


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
