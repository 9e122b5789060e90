"""Tools that an answer may call, as a grammar: whatever is written as a call is a call of a given
tool, with arguments that fit its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from serve.answers.format import CallFormat
from serve.answers.forms import settings_of

MAX_CALLS = 16
"""Of one answer: under `required` a small model would go on until its tokens run out."""


class Tool(NamedTuple):
    """A function: its name, and the schema of its arguments, checked. `lenient`: what of it cannot
    be enforced is left out."""

    name: str
    parameters: Any
    lenient: bool = False


class ToolWish(NamedTuple):
    """Which tools may be called. `must_call`: the answer is nothing but calls. `parallel`: it may
    be several."""

    tools: Sequence[Tool]
    must_call: bool = False
    parallel: bool = True


def calls_form(calls: CallFormat, wish: ToolWish) -> str:
    """The grammar of an answer that may, or must, call tools in this format, which has a marker
    before each call and JSON behind it."""
    assert calls.kind == "json"
    assert calls.open
    more = MAX_CALLS - 1 if wish.parallel else 0
    rest = f'("\\n" call){{0,{more}}}' if more else ""
    if wish.must_call:
        start = [f"start: call {rest}"]
    else:
        opens = re.escape(calls.open).replace("/", r"\/")
        start = [
            f"start: TEXT | to_call body {rest}",
            f"to_call[lazy]: /(?s:.*){opens}/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){opens}(?s:.*)/",
        ]
    bodies = " | ".join(f"tool{i}" for i in range(len(wish.tools)))
    return "\n".join(
        [
            *start,
            f"call: {json.dumps(calls.open)} body",
            f'body: "\\n" ({bodies}) {json.dumps(chr(10) + calls.close)}',
            *(_tool_rule(i, tool, calls) for i, tool in enumerate(wish.tools)),
        ]
    )


def _tool_rule(number: int, tool: Tool, calls: CallFormat) -> str:
    head = f'{{"{calls.name_key}": {json.dumps(tool.name)}, "{calls.arguments_key}": '
    schema = {**tool.parameters, "x-guidance": settings_of(lenient=tool.lenient)}
    arguments = f"arguments{number}: %json {json.dumps(schema)}"
    return f'tool{number}: {json.dumps(head)} arguments{number} "}}"\n{arguments}'
