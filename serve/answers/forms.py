"""The forms that an answer can be asked for, each as a grammar in the Lark dialect of llguidance.

A JSON document may have white space where JSON allows it, but never more than a little: without a
bound, small models write blanks until their tokens run out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from serve.errors import InvalidRequest

WHITE_SPACE = r"[ \n\t]{0,16}"
"""Between two parts of a JSON document; enough to indent eight levels."""
MAX_CHOICES = 1000
_ENDS_ROLLBACK = re.compile(r"\b(max_tokens|temperature|stop|stop_capture|lazy)\s*=")
_SETTINGS = "x-guidance"
"""The key of a schema that llguidance takes its settings from: ours, never the client's."""


class JsonStyle(NamedTuple):
    """How a JSON document may be laid out. `white_space`: a regular expression, or None for none.
    `closed`: objects have no properties but those that their schemas name."""

    white_space: str | None = WHITE_SPACE
    closed: bool = False


USUAL = JsonStyle()


def json_form(schema: Any, style: JsonStyle = USUAL, *, lenient: bool = False) -> str:
    """A document that fits a schema; `lenient` leaves out what cannot be held to. Raises
    InvalidRequest."""
    if schema is False:
        raise InvalidRequest("the schema false admits nothing.")
    own = {} if schema is True else schema
    if style.closed:
        own = _closed(own)
    return f"start: %json {json.dumps({**own, _SETTINGS: settings_of(style, lenient=lenient)})}"


def settings_of(style: JsonStyle = USUAL, *, lenient: bool = False) -> dict[str, Any]:
    """How llguidance is to read a schema, under the key `x-guidance`."""
    common = {"coerce_one_of": False, "lenient": lenient}
    if style.white_space is None:
        layout = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    else:
        layout = {"whitespace_flexible": True, "whitespace_pattern": style.white_space}
    return {**common, **layout}


def object_form(style: JsonStyle = USUAL) -> str:
    """Any JSON object."""
    return json_form({"type": "object"}, style)


def regex_form(regex: str) -> str:
    """A text that a regular expression in Rust's syntax matches as a whole."""
    slashes = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", regex, flags=re.DOTALL)
    return "start: /" + slashes.replace("\n", r"\n") + "/"


def choice_form(choices: Sequence[str]) -> str:
    """One of some texts. Raises InvalidRequest."""
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise InvalidRequest(f"there must be 1 to {MAX_CHOICES} choices, none of them empty.")
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def grammar_form(text: str) -> str:
    """A grammar that a client wrote: GBNF, as llama.cpp has it, if it has `::=`; else Lark. Raises
    InvalidRequest."""
    if "::=" in text:
        try:
            return str(gbnf_to_lark(text))
        except GbnfToLarkError as error:
            raise InvalidRequest(f"it is not a GBNF grammar: {error}") from error
    found = _ENDS_ROLLBACK.search(text)
    if found is not None:
        raise InvalidRequest(f"the attribute {found[1]} is not supported in a grammar.")
    return text


def _closed(schema: Any) -> Any:
    """A schema whose objects have only the properties that are named."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: value if key in _VALUES else _closed(value) for key, value in schema.items()}
    if "properties" in inner and isinstance(inner["properties"], Mapping):
        inner.setdefault("additionalProperties", False)
    return inner


_VALUES = frozenset({"const", "enum", "default", "examples", "required"})
"""Keywords whose values are no schemas."""
