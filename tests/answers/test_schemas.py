from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from benchmarks.json_schemas import admits, matcher
from serve.answers.schema_keywords import FORMATS, UNENFORCEABLE
from serve.answers.schemas import (
    MAX_DEPTH,
    MAX_NODES,
    check_schema,
    header_value,
    places_of,
)
from serve.errors import InvalidRequest

FIELD = "response_format.json_schema.schema"


def fault(schema: Any, *, strict: bool = True, max_bytes: int = 10**6) -> str:
    with pytest.raises(InvalidRequest) as raised:
        check_schema(schema, FIELD, strict=strict, max_bytes=max_bytes)
    assert raised.value.param == FIELD
    message = str(raised.value)
    assert message.startswith(FIELD)
    return message.removeprefix(f"{FIELD}: ")


# ---------------------------------------------------------------------------- no schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (5, "at its root: a schema must be an object or a boolean."),
        ({"properties": {"age": {"type": "int"}}}, "/properties/age/type: 'int' is not a type"),
        ({"type": ["string", None]}, "/type: None is not a type"),
        ({"type": []}, "/type: [] is not a type"),
        ({"properties": {"a/b~": {"type": {}}}}, "/properties/a~1b~0/type: {} is not a type"),
        ({"properties": []}, "/properties: must be an object"),
        ({"properties": {"a": 5}}, "/properties/a: a schema must be an object or a boolean"),
        ({"items": {"items": "string"}}, "/items/items: a schema must be"),
        ({"items": [{}, 1]}, "/items/1: a schema must be"),
        ({"anyOf": []}, "/anyOf: must be a list with a schema in it"),
        ({"anyOf": [{}, {"required": "a"}]}, "/anyOf/1/required: must be a list of strings"),
        ({"enum": []}, "/enum: must be a list with a value in it"),
        ({"minLength": -1}, "/minLength: must be a whole number, not below 0"),
        ({"minLength": 1.5}, "/minLength: must be a whole number"),
        ({"maxItems": True}, "/maxItems: must be a whole number"),
        ({"minimum": "3"}, "/minimum: must be a number."),
        ({"multipleOf": 0}, "/multipleOf: must be a number above 0"),
        ({"pattern": 5}, "/pattern: must be a string"),
        ({"$ref": 5}, "/$ref: must be a string"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}}}, "/$defs/a/$ref: '#/$defs/b' leads nowhere"),
        ({"uniqueItems": "yes"}, "/uniqueItems: must be true or false"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_sto_01_what_is_no_schema_is_refused_by_its_place(
    schema: Any, message: str, strict: bool
) -> None:
    assert fault(schema, strict=strict).startswith(message)


def test_keywords_within_values_and_names_of_properties_are_no_keywords() -> None:
    schema = {
        "properties": {"not": {"type": "string"}, "uniqueItems": {"const": {"not": 5}}},
        "default": {"type": "int"},
        "examples": [{"contains": 1}],
        "enum": [{"if": 1}],
    }
    assert check_schema(schema, FIELD, strict=True) == (schema, ())


def test_references_lead_anywhere_in_the_schema() -> None:
    schema = {
        "$defs": {"a b/c~": {"type": "string"}, "tree": {"items": {"$ref": "#/$defs/tree"}}},
        "anyOf": [{"$ref": "#/$defs/a%20b~1c~0"}, {"$ref": "#"}, {"$ref": "#/anyOf/1"}],
    }
    assert check_schema(schema, FIELD, strict=True) == (schema, ())


# ---------------------------------------------------------------------------- too large


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_of_any_depth_is_refused_without_following_it() -> None:
    assert check_schema(nested(MAX_DEPTH - 1), FIELD, strict=True).relaxed == ()
    for depth in (MAX_DEPTH, 100_000):
        assert f"deeper than {MAX_DEPTH} levels" in fault(nested(depth))


def test_parts_bytes_and_values_are_bounded() -> None:
    assert f"more than {MAX_NODES} parts" in fault({"enum": list(range(MAX_NODES))})
    assert "/enum: has 10001 values; at most 10000 are taken" in fault({"enum": [1] * 10_001})
    message = fault({"description": "ü" * 500}, max_bytes=1000)
    assert "1019 bytes; at most 1000 are taken (--max-schema-bytes)" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_what_cannot_be_written_as_json_is_refused(value: Any) -> None:
    assert "is not JSON" in fault({"const": value})


def test_a_message_never_repeats_a_long_name() -> None:
    assert len(fault({"properties": {"a" * 50_000: {"not": {}}}})) < 500


# ---------------------------------------------------------------------------- not enforceable

MEANINGFUL: dict[str, Any] = {
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "contains": {"type": "string"},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"minProperties": 2}},
    "if": {"type": "string"},
    "not": {"type": "string"},
    "propertyNames": {"maxLength": 3},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
    "format": "json-pointer",
    "pattern": "a(?!b)",
    "maxProperties": 1,
    "minProperties": 1,
    "const": 2**53 + 1,
    "enum": [1, {"a": [-(2**60)]}],
    "maximum": 2**60,
    "minLength": 2**40,
}
BESIDE: dict[str, Any] = {"then": {"minLength": 2}, "properties": {"x": {}}, "anyOf": [{}]}


def test_every_keyword_that_is_never_enforced_is_tried() -> None:
    assert MEANINGFUL.keys() >= UNENFORCEABLE


def test_the_page_on_answers_names_the_keywords_and_formats_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "answers.md").read_text(encoding="utf-8")
    promised = page.split("Where they say anything,")[1].split("\n- ")[0]
    named = set(re.findall(r"`([^`]+)`", promised))
    assert named == {*UNENFORCEABLE, *FORMATS, "oneOf", "pattern", "format"}


@pytest.mark.parametrize("key", MEANINGFUL)
def test_what_cannot_be_promised_is_refused_by_keyword_and_place(key: str) -> None:
    schema = {"properties": {"t/": {**BESIDE, key: MEANINGFUL[key]}}}
    assert fault(schema).startswith(f"/properties/t~1/{key} cannot be enforced; leave it out")


@pytest.mark.parametrize("key", MEANINGFUL)
def test_without_strict_it_is_left_out_and_told(key: str) -> None:
    beside = {name: value for name, value in BESIDE.items() if name != "then"}
    schema = {"properties": {"a": {**BESIDE, key: MEANINGFUL[key], "type": []}, "b": {}}}
    schema["properties"]["a"].pop("type")
    checked = check_schema(schema, FIELD, strict=False)
    assert checked.relaxed == (f"/properties/a/{key}",)
    assert checked.schema == {"properties": {"a": beside, "b": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"uniqueItems": True, "maxItems": 1},
        {"uniqueItems": True, "type": "string"},
        {"type": ["integer", "null"], "format": "int32"},
        {"type": "array", "propertyNames": {"maxLength": 1}},
        {"contains": {}, "minContains": 0},
        {"minContains": 3},
        {"if": {"type": "string"}},
        {"if": {"type": "string"}, "then": True, "else": {}},
        {"then": {"minLength": 3}},
        {"not": False},
        {"propertyNames": {}},
        {"unevaluatedProperties": True, "anyOf": [{}]},
        {"dependentRequired": {"a": []}, "dependentSchemas": {"b": True}, "dependencies": {}},
        {"minProperties": 1, "properties": {"a": {}, "b": {}}, "required": ["a"]},
        {"maxProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"maxLength": 2**40},
        {"$dynamicAnchor": "a"},
    ],
)
def test_a_keyword_that_says_nothing_where_it_stands_is_no_fault(schema: dict[str, Any]) -> None:
    checked = check_schema(schema, FIELD, strict=True)
    assert checked.relaxed == ()
    assert not matcher(checked.schema).is_error()


@pytest.mark.parametrize(
    ("pattern", "can"),
    [
        (r"^a[(?=]b$", True),
        (r"\(?=", True),
        (r"[^]](?:a)", True),
        (r"\\1", True),
        (r"(?<name>a)", True),
        (r"(?<=a)b", False),
        (r"(?<!a)b", False),
        (r"(a)\1", False),
        (r"(?<q>a)\k<q>", False),
        (r"[a\]](?=b)", False),
    ],
)
def test_patterns_that_look_around_are_known_from_their_text(pattern: str, can: bool) -> None:
    checked = check_schema({"pattern": pattern}, FIELD, strict=False)
    assert (checked.relaxed == ()) is can
    assert matcher({"pattern": pattern}).is_error() is not can


def test_settings_of_the_grammar_are_not_the_clients() -> None:
    schema = {"x-guidance": {"lenient": True}, "items": {"x-guidance": {}, "type": "null"}}
    assert check_schema(schema, FIELD, strict=True).schema == {"items": {"type": "null"}}
    named = {"properties": {"x-guidance": {"type": "null"}}}
    assert check_schema(named, FIELD, strict=True).schema == named


def test_unevaluated_is_additional_where_nothing_is_applied_in_place() -> None:
    schema = {"properties": {"a": {}}, "unevaluatedProperties": False}
    kept = check_schema(schema, FIELD, strict=True).schema
    assert kept == {"properties": {"a": {}}, "additionalProperties": False}
    schema = {"prefixItems": [{}], "unevaluatedItems": {"not": {"type": "null"}}}
    assert fault(schema).startswith("/unevaluatedItems/not cannot be enforced")


def test_a_reference_of_draft_7_overrides_what_is_beside_it() -> None:
    beside = {"items": {"$ref": "#/definitions/a", "not": {}}, "definitions": {"a": {}}}
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **beside}
    kept = check_schema(old, FIELD, strict=True).schema
    assert kept == {**old, "items": {"$ref": "#/definitions/a"}}
    assert "/items/not cannot be enforced" in fault(beside)
    third = {"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "string"}
    assert "/$schema: draft 3 is not supported" in fault(third, strict=False)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29"]),
        (
            "date",
            ["2021-04-30"],
            ["2021-04-31", "2021-13-01", "2021-00-10", "2021-1-1"],
        ),
        ("time", ["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("date-time", ["2024-02-29T12:30:00Z"], ["2023-02-29T12:30:00Z", "2024-02-29 12:30:00Z"]),
    ],
)
def test_dates_and_times_are_held_to_the_day(form: str, good: list[str], bad: list[str]) -> None:
    for schema in ({"format": form}, {"type": "string", "format": form, "pattern": "[02]"}):
        grammar = matcher(check_schema(schema, FIELD, strict=True).schema)
        assert [text for text in good if not admits(grammar, text)] == []
        assert [text for text in bad if admits(grammar, text)] == []


def test_one_of_branches_that_are_relaxed_any_will_do() -> None:
    relaxed = {"oneOf": [{"not": {"type": "null"}}, {"type": "string"}], "anyOf": [True]}
    kept, places = check_schema(relaxed, FIELD, strict=False)
    assert kept == {"anyOf": [True], "allOf": [{"anyOf": [{}, {"type": "string"}]}]}
    assert places == ("/oneOf/0/not", "/oneOf")


def test_every_place_is_told_and_a_header_carries_the_first_few() -> None:
    schema = {"properties": {f"ä\n{at}": {"not": {}} for at in range(20)}}
    checked = check_schema(schema, FIELD, strict=False)
    assert len(checked.relaxed) == 20
    value = header_value(checked.relaxed)
    assert value.startswith("/properties/%C3%A4%0A0/not, ")
    assert value.endswith(" and 12 more")
    assert value.isascii()
    assert value.isprintable()
    assert fault(schema).count("/not") == 8


def test_uses_of_a_keyword_are_found() -> None:
    schema = {
        "properties": {"oneOf": {"oneOf": [{"items": {"oneOf": [{}]}}]}},
        "const": {"oneOf": 1},
    }
    found = places_of(schema, "oneOf")
    assert found == ["/properties/oneOf/oneOf", "/properties/oneOf/oneOf/0/items/oneOf"]


# ---------------------------------------------------------------------------- any schema

NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "bb", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
SMALL = st.integers(0, 3)
TYPE_NAMES = st.sampled_from(["array", "boolean", "integer", "null", "number", "object", "string"])


def keywords(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lists, maps = st.lists(schemas, min_size=1, max_size=3), st.dictionaries(NAMES, schemas)
    names = st.lists(NAMES, max_size=2, unique=True)
    counts = "minItems maxItems minLength maxLength minProperties maxProperties minContains"
    single = "items additionalProperties contains propertyNames not if then else"
    optional: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPE_NAMES | st.lists(TYPE_NAMES, min_size=1, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "required": names,
        "properties": maps,
        "dependentSchemas": maps,
        "dependentRequired": st.dictionaries(NAMES, names),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), schemas),
        "unevaluatedProperties": schemas,
        "unevaluatedItems": schemas,
        "uniqueItems": st.booleans(),
        "maxContains": SMALL,
        "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "multipleOf": st.integers(1, 3),
        "pattern": st.sampled_from(["^a", "b$", "a(?=b)"]),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), lists),
        **dict.fromkeys(counts.split(), SMALL),
        **dict.fromkeys(single.split(), schemas),
    }
    few = st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)
    return few.flatmap(lambda keys: st.fixed_dictionaries({key: optional[key] for key in keys}))


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=6)


def property_of(schema: Any, documents: list[Any]) -> None:
    """What is left out admits more, never less; nothing left out changes nothing; and what the
    grammar then admits fits the schema as it was given, if nothing was left out."""
    checked = check_schema(schema, FIELD, strict=False)
    given_one, kept = Draft202012Validator(schema), Draft202012Validator(checked.schema)
    Draft202012Validator.check_schema(checked.schema)
    grammar = matcher(checked.schema)
    for document in documents:
        fits = given_one.is_valid(document)
        assert kept.is_valid(document) >= fits
        if not checked.relaxed:
            assert kept.is_valid(document) == fits
            if not grammar.is_error() and admits(grammar, document):
                assert fits
    if checked.relaxed:
        with pytest.raises(InvalidRequest, match="cannot be enforced"):
            check_schema(schema, FIELD, strict=True)


@settings(max_examples=200, deadline=None)
@given(SCHEMAS, st.lists(VALUES, max_size=8))
def test_no_schema_promises_what_its_grammar_does_not_hold(schema: Any, documents: Any) -> None:
    property_of(schema, documents)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(SCHEMAS, st.lists(VALUES, max_size=12))
def test_no_schema_of_very_many_promises_too_much(schema: Any, documents: Any) -> None:
    property_of(schema, documents)


@settings(max_examples=300, deadline=None)
@given(st.recursive(VALUES, lambda v: st.dictionaries(st.sampled_from(sorted(MEANINGFUL)), v)))
def test_any_json_is_a_schema_or_is_refused_by_name(schema: Any) -> None:
    with suppress(InvalidRequest):
        json.dumps(check_schema(schema, FIELD, strict=False).schema)
