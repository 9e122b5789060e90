"""What the keywords of a JSON schema must look like, and which of them no grammar can hold to.

After JSON Schema 2020-12 (json-schema.org), with what older drafts had under other names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from serve.answers.schema_dates import PATTERNS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MAX_ENUM_VALUES = 10_000

FORMATS = _words("date date-time duration email hostname ipv4 ipv6 time uri uuid")
"""Those a grammar knows."""
UNENFORCEABLE = _words(
    "$dynamicRef $recursiveRef contains dependencies dependentRequired dependentSchemas if not "
    "propertyNames unevaluatedItems unevaluatedProperties uniqueItems"
)
"""Keywords that are never held to, unless they say nothing where they stand."""

ONE_SCHEMA = _words(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames "
    "then unevaluatedItems unevaluatedProperties"
)
SCHEMA_LISTS = _words("allOf anyOf oneOf prefixItems")
SCHEMA_MAPS = _words("$defs definitions dependentSchemas patternProperties properties")
_COUNTS = _words(
    "maxContains maxItems maxLength maxProperties minContains minItems minLength minProperties"
)
_LIMITS = _words("exclusiveMaximum exclusiveMinimum maximum minimum multipleOf")
_TEXTS = _words("$anchor $id $ref $schema format pattern")
_APPLICATORS = _words(
    "$dynamicRef $recursiveRef $ref allOf anyOf contains dependencies dependentSchemas if not oneOf"
)
_BESIDE_REF = _words("$defs $ref $schema definitions")
_APPLIES_TO = {
    "array": _words("contains unevaluatedItems uniqueItems"),
    "object": _words(
        "dependencies dependentRequired dependentSchemas maxProperties minProperties "
        "propertyNames unevaluatedProperties"
    ),
    "string": _words("format pattern"),
}
# Whole numbers beyond this are rounded on their way into a grammar.
_MAX_EXACT = 2**53
# Grammars count no further, and no answer is that long.
_MAX_COUNT = 2**32 - 1
# An escaped character; a class, in which nothing looks around; a look-around.
_REGEX_PARTS = re.compile(r"\\(.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)


def complaint(key: str, value: Any) -> str | None:
    """What makes a keyword's value impossible in any schema; None if it may stand there. The
    schemas within it are not looked at."""
    if key == "type":
        return _type_complaint(value)
    if key == "required":
        good = _is_texts(value)
        return None if good else "must be a list of strings"
    if key == "enum":
        return _enum_complaint(value)
    if key in SCHEMA_LISTS:
        return None if isinstance(value, list) and value else "must be a list with a schema in it"
    if key in SCHEMA_MAPS or key in {"dependencies", "dependentRequired"}:
        return None if isinstance(value, dict) else "must be an object"
    return _plain_complaint(key, value)


def says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword can be left out of a schema without admitting one document more."""
    types = types_of(schema)
    owner = next((kind for kind, keys in _APPLIES_TO.items() if key in keys), None)
    if types is not None and owner is not None and owner not in types:
        return True
    match key:
        case "uniqueItems":
            return value is not True or schema.get("maxItems", 2) < 2
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return _admits_all(value)
        case "not":
            return value is False
        case "if":
            return all(_admits_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return all(_admits_all(needed) or needed == [] for needed in value.values())
        case "minProperties":
            return bool(value <= len(set(schema.get("required", ()))))
        case "maxProperties":
            closed = schema.get("additionalProperties") is False
            named = len(schema.get("properties", ()))
            return closed and "patternProperties" not in schema and bool(value >= named)
        case "maxItems" | "maxLength":
            return bool(value > _MAX_COUNT)
    # Conditions without their `if`, counts without their `contains`, targets of no reference.
    return key in {"then", "else", "minContains", "maxContains"} | {
        "$dynamicAnchor",
        "$recursiveAnchor",
    }


def can_enforce(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a grammar holds to a keyword that says something."""
    match key:
        case "format":
            return value in FORMATS
        case "pattern":
            return not _looks_around(value)
        case "minProperties" | "maxProperties":
            return set(schema.get("properties", ())) <= set(schema.get("required", ()))
        case "const" | "enum":
            return _is_exact(value)
    if key in _COUNTS and value > _MAX_COUNT:
        return False
    return key not in UNENFORCEABLE and (key not in _LIMITS or _is_exact(value))


def in_grammars_words(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema in keywords that a grammar knows: where no other schema is applied in
    place, what is not evaluated is what is not named."""
    own = {key: _whole(value) if key in _COUNTS else value for key, value in schema.items()}
    own.pop("x-guidance", None)
    if own.get("format") in PATTERNS:
        exact = {"pattern": PATTERNS[own.pop("format")]}
        own = {**own, "allOf": [*own.get("allOf", ()), exact]} if "pattern" in own else own | exact
    if not _APPLICATORS & own.keys():
        for late, early in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "additionalItems" if _is_list(own.get("items")) else "items"),
        ):
            if late in own:
                own.setdefault(early, own.pop(late))
                own.pop(late, None)
    return own


def overridden(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of draft 7 or before as it is meant: a `$ref` makes all beside it void."""
    if "$ref" not in schema:
        return dict(schema)
    return {key: value for key, value in schema.items() if key in _BESIDE_REF}


def types_of(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema names for its documents; None if it names none."""
    named = schema.get("type")
    if named is None:
        return None
    return {named} if isinstance(named, str) else set(named)


def _type_complaint(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    wrong = [name for name in names if not isinstance(name, str) or name not in TYPES]
    if wrong or not names:
        return f"{_short(wrong[0] if wrong else value)} is not a type; {', '.join(TYPES)} are"
    return None


def _enum_complaint(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list with a value in it"
    if len(value) > MAX_ENUM_VALUES:
        return f"has {len(value)} values; at most {MAX_ENUM_VALUES} are taken"
    return None


def _plain_complaint(key: str, value: Any) -> str | None:
    if key in _COUNTS and not (_is_number(value) and value == int(value) and value >= 0):
        return "must be a whole number, not below 0"
    if key in _LIMITS and not _is_limit(key, value):
        return "must be a number" + (" above 0" if key == "multipleOf" else "")
    if key in _TEXTS and not isinstance(value, str):
        return "must be a string"
    if key == "uniqueItems" and not isinstance(value, bool):
        return "must be true or false"
    return None


def _is_limit(key: str, value: Any) -> bool:
    if key.startswith("exclusive") and isinstance(value, bool):  # draft 4
        return True
    return _is_number(value) and (key != "multipleOf" or value > 0)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) else value


def _admits_all(schema: Any) -> bool:
    return schema is True or schema == {}


def _is_exact(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_exact(item) for item in value)
    if isinstance(value, dict):
        return all(_is_exact(item) for item in value.values())
    return not _is_number(value) or abs(value) <= _MAX_EXACT


def _looks_around(pattern: str) -> bool:
    """Whether a pattern looks ahead, behind, or back at what it matched before."""
    parts = _REGEX_PARTS.finditer(pattern)
    return any(
        part[0].startswith("(?") or (part[1] is not None and part[1] in "123456789k")
        for part in parts
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
