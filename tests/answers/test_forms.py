"""Forms as grammars: what they admit, and what is refused before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.answers.check import Verdicts, keywords_of
from serve.answers.forms import (
    JsonStyle,
    choice_form,
    grammar_form,
    json_form,
    object_form,
    regex_form,
)
from serve.engine.grammar.vocabulary import TokenTable, vocabulary_of
from serve.errors import InvalidRequest

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def by_bytes() -> LLTokenizer:
    """One token a byte, and an end."""
    table = TokenTable(
        [*(bytes([i]) for i in range(256)), b"<end>"], [256], 256, lambda t: [*t.encode()]
    )
    return vocabulary_of(table, [256])


def admits(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a whole text fits."""
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "fits", "misfits"),
    [
        (json_form(PERSON), ['{"name":"a","age":1}', '{\n  "name": "a",\n  "age": 0\n}'],
         ["{}", '{"name":"a"}', '{"name":"a","age":-1}', '{"name":"a","age":1'  + " " * 20 + "}"]),
        (json_form(PERSON, JsonStyle(white_space=None)), ['{"name":"a","age":1}'],
         ['{"name": "a","age":1}']),
        (json_form(PERSON, JsonStyle(closed=True)), ['{"name":"a","age":1}'],
         ['{"name":"a","age":1,"x":2}']),
        (json_form(True), ["1", "null", '"a"', "[]"], ["", "nul"]),
        (object_form(), ["{}", '{"a": [1, null]}'], ["[]", "1", '"a"']),
        (regex_form(r"a/b\d{2}"), ["a/b12"], ["a/b1", "xa/b12"]),
        (regex_form("a\\/b"), ["a/b"], ["a\\/b"]),
        (regex_form("x\n+"), ["x\n\n"], ["x"]),
        (choice_form(["yes", "no", 'q"\n']), ["yes", "no", 'q"\n'], ["ye", "maybe", ""]),
        (grammar_form('root ::= "a" [0-9]+'), ["a1", "a123"], ["a", "b1"]),
        (grammar_form('start: "a" B\nB: /[0-9]+/'), ["a1"], ["a"]),
    ],
)  # fmt: skip
def test_a_form_admits_what_fits_and_nothing_else(
    by_bytes: LLTokenizer, grammar: str, fits: list[str], misfits: list[str]
) -> None:
    assert [text for text in fits if not admits(by_bytes, grammar, text)] == []
    assert [text for text in misfits if admits(by_bytes, grammar, text)] == []


def test_a_schema_cannot_change_how_it_is_read() -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert Verdicts().of(json_form(schema)).error is not None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ],
)
def test_what_cannot_be_enforced_is_named_and_only_left_out_where_that_is_asked_for(
    schema: dict[str, Any], keyword: str
) -> None:
    verdicts = Verdicts()
    assert keyword in (verdicts.of(json_form(schema)).error or "")
    lenient = verdicts.of(json_form(schema, lenient=True))
    assert lenient.error is None
    assert keywords_of(lenient.warnings) == [keyword]


def test_the_schema_that_admits_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing"):
        json_form(False)


@pytest.mark.parametrize("schema", [{"type": "foo"}, {"$ref": "#/nowhere"}])
def test_what_is_no_schema_or_admits_nothing_is_refused(schema: Any) -> None:
    assert Verdicts().of(json_form(schema, lenient=True)).error


@pytest.mark.parametrize("text", ["start: foo", "start", 'root ::= "a', "start: A[max_tokens=3]"])
def test_a_broken_grammar_is_refused(text: str) -> None:
    try:
        grammar = grammar_form(text)
    except InvalidRequest:
        return
    assert Verdicts().of(grammar).error


@pytest.mark.parametrize("choices", [[], [""], ["a", ""], ["x"] * 1001])
def test_choices_are_few_and_not_empty(choices: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="choices"):
        choice_form(choices)


def test_a_verdict_is_kept() -> None:
    verdicts = Verdicts()
    assert verdicts.of(json_form(PERSON)) is verdicts.of(json_form(json.loads(json.dumps(PERSON))))
