"""Whether an answer can be held to a JSON schema, asked of its text alone before anything is made
of it: what is no schema, is too large, or says what no grammar can promise, is named.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from serve.answers.schema_keywords import (
    ONE_SCHEMA,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    can_enforce,
    complaint,
    in_grammars_words,
    overridden,
    says_nothing,
)
from serve.errors import InvalidRequest

MAX_BYTES = 262_144
MAX_DEPTH = 64
MAX_NODES = 20_000
_OLD_DRAFT = re.compile(r"json-schema\.org/draft-0([0-7])/")
_MAX_TOLD = 8
_MAX_POINTER = 200

Schema = dict[str, Any] | bool


class CheckedSchema(NamedTuple):
    """A schema in keywords that a grammar knows, and what had to be left out of it: JSON pointers
    into the schema that was given. Every document that fits the one given fits this one, and the
    other way too if nothing was left out."""

    schema: Schema
    relaxed: tuple[str, ...] = ()


def check_schema(
    schema: Any, name: str, *, strict: bool, max_bytes: int = MAX_BYTES
) -> CheckedSchema:
    """A client's schema, from its parsed JSON.

    `name` is the field it came in. `strict`: what cannot be enforced is refused; else left out.
    Raises InvalidRequest, with `name` as its field and the place within it as a JSON pointer.
    """
    check_size(schema, name, max_bytes=max_bytes)
    walk = _Walk(name, is_old=_is_old(schema, name))
    kept = walk.schema(schema, "")
    walk.check_references(schema)
    if walk.relaxed and strict:
        raise InvalidRequest(
            f"{name}: {_listed(walk.relaxed)} cannot be enforced; leave it out or set strict to "
            "false.",
            param=name,
        )
    return CheckedSchema(kept, tuple(walk.relaxed))


def check_size(schema: Any, name: str, *, max_bytes: int = MAX_BYTES) -> None:
    """Takes time by what is allowed, not by what was sent. Raises InvalidRequest for a value that
    is nested too deep, has too many parts or bytes, or cannot be written as JSON."""
    num_nodes, level = 0, [schema]
    for _ in range(MAX_DEPTH + 1):
        num_nodes += len(level)
        if num_nodes > MAX_NODES:
            raise InvalidRequest(f"{name} has more than {MAX_NODES} parts.", param=name)
        level = [child for node in level for child in _children(node)]
        if not level:
            break
    else:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_DEPTH} levels.", param=name)
    try:
        num_bytes = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except ValueError as error:  # a number that is not finite, half of a surrogate pair
        raise InvalidRequest(f"{name} is not JSON: {error}.", param=name) from error
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"{name} has {num_bytes} bytes; at most {max_bytes} are taken (--max-schema-bytes).",
            param=name,
        )


def places_of(schema: Any, keyword: str) -> list[str]:
    """JSON pointers of every use of a keyword: for what only the making of a grammar finds out,
    such as branches of a `oneOf` that overlap."""
    return [pointer for pointer, key in _uses(schema, "") if key == keyword]


def header_value(pointers: tuple[str, ...]) -> str:
    """Pointers as an HTTP header can carry them: the first few, percent-encoded."""
    told = [quote(_cut(pointer), safe="/~$-_.") for pointer in pointers[:_MAX_TOLD]]
    more = len(pointers) - len(told)
    return ", ".join(told) + (f" and {more} more" if more else "")


class _Walk:
    """One way through a schema, top down."""

    def __init__(self, name: str, *, is_old: bool) -> None:
        self._name = name
        self._is_old = is_old
        self._references: list[tuple[str, str]] = []  # pointer of a $ref, what it refers to
        self._has_ids = False
        self.relaxed: list[str] = []

    def schema(self, node: Any, pointer: str) -> Any:
        """What a grammar can hold to of a schema. Raises InvalidRequest."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise self._fault(pointer, "a schema must be an object or a boolean")
        if self._is_old:
            node = overridden(node)
        for key, value in node.items():
            fault = complaint(key, value)
            if fault is not None:
                raise self._fault(_join(pointer, key), fault)
        self._note_references(node, pointer)
        kept: dict[str, Any] = {}
        one_of: dict[str, Any] = {}
        for key, value in in_grammars_words(node).items():
            if says_nothing(key, value, node):
                continue
            place = _join(pointer, key if key in node else _former(key, node))
            if key == "oneOf":
                one_of = self._one_of(value, place)
            elif can_enforce(key, value, node):
                kept[key] = self._children(key, value, place)
            else:
                self.relaxed.append(place)
        return _with_one_of(kept, one_of)

    def _one_of(self, branches: list[Any], place: str) -> Any:
        """Branches that admit more than they said may overlap, and then `oneOf` would admit less:
        of such, any will do. Returns a schema."""
        num_before = len(self.relaxed)
        kept = [self.schema(one, f"{place}/{at}") for at, one in enumerate(branches)]
        if len(self.relaxed) == num_before:
            return {"oneOf": kept}
        self.relaxed.append(place)
        return {"anyOf": kept}

    def check_references(self, root: Any) -> None:
        """Raises InvalidRequest for a `$ref` that leads nowhere. With an `$id` inside, a reference
        may begin elsewhere than at the root: then the making of the grammar finds out."""
        for place, target in [] if self._has_ids else self._references:
            if target.startswith("#/") and not _resolves(root, target):
                raise self._fault(place, f"{_cut(target)!r} leads nowhere")

    def _children(self, key: str, value: Any, pointer: str) -> Any:
        if key in SCHEMA_MAPS:
            return {name: self.schema(one, _join(pointer, name)) for name, one in value.items()}
        if key in SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
            return [self.schema(one, f"{pointer}/{at}") for at, one in enumerate(value)]
        return self.schema(value, pointer) if key in ONE_SCHEMA else value

    def _note_references(self, node: dict[str, Any], pointer: str) -> None:
        if "$ref" in node:
            self._references.append((_join(pointer, "$ref"), node["$ref"]))
        self._has_ids |= pointer != "" and bool({"$id", "id"} & node.keys())

    def _fault(self, pointer: str, fault: str) -> InvalidRequest:
        where = _cut(pointer) or "at its root"
        return InvalidRequest(f"{self._name}: {where}: {fault}.", param=self._name)


def _is_old(schema: Any, name: str) -> bool:
    """Whether a schema is of a draft in which a `$ref` overrides what is beside it. Raises
    InvalidRequest for a draft that had other keywords for the same."""
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    found = _OLD_DRAFT.search(draft) if isinstance(draft, str) else None
    if found is not None and int(found[1]) < 4:
        raise InvalidRequest(
            f"{name}: /$schema: draft {int(found[1])} is not supported; draft 4 and later are.",
            param=name,
        )
    return found is not None


def _with_one_of(kept: dict[str, Any], one_of: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in one_of and "anyOf" in kept:
        return {**kept, "allOf": [*kept.get("allOf", ()), one_of]}
    return kept | one_of


def _uses(node: Any, pointer: str) -> list[tuple[str, str]]:
    found = []
    for key, value in node.items() if isinstance(node, dict) else ():
        place = _join(pointer, key)
        found.append((place, key))
        if key in SCHEMA_MAPS and isinstance(value, dict):
            for name, one in value.items():
                found += _uses(one, _join(place, name))
        elif isinstance(value, list) and (key in SCHEMA_LISTS or key == "items"):
            for at, one in enumerate(value):
                found += _uses(one, f"{place}/{at}")
        elif key in ONE_SCHEMA:
            found += _uses(value, place)
    return found


def _former(key: str, node: dict[str, Any]) -> str:
    """The keyword that `in_grammars_words` made another of."""
    return "unevaluatedProperties" if key == "additionalProperties" else "unevaluatedItems"


def _resolves(root: Any, reference: str) -> bool:
    node = root
    for part in unquote(reference[2:]).split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return False
    return True


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _join(pointer: str, key: str) -> str:
    return f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"


def _cut(pointer: str) -> str:
    return pointer if len(pointer) <= _MAX_POINTER else f"{pointer[:_MAX_POINTER]}…"


def _listed(pointers: list[str]) -> str:
    more = len(pointers) - _MAX_TOLD
    told = ", ".join(_cut(pointer) for pointer in pointers[:_MAX_TOLD])
    return f"{told} and {more} more" if more > 0 else told
