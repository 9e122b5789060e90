"""The form that a request asks of its answer, in whichever of the fields that servers have for it;
OpenAI's, vLLM's old and new ones, llama.cpp's and SGLang's."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from serve.answers.check import VERDICTS, keywords_of
from serve.answers.forms import (
    USUAL,
    JsonStyle,
    choice_form,
    grammar_form,
    json_form,
    object_form,
    regex_form,
)
from serve.answers.schemas import check_schema, header_value, places_of
from serve.api.errors import Unsupported
from serve.api.protocol.common import GenerationRequest, StructuredOutputs
from serve.config import ServerConfig
from serve.errors import InvalidRequest
from serve.sampling_params import Grammar

logger = logging.getLogger(__name__)

_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
_FIELDS = frozenset({"response_format", "structured_outputs", *_OLD_NAMES})


class _Wish(NamedTuple):
    """What one field asks. `strict`: refuse what cannot be held to, instead of saying so."""

    field: str
    kind: str  # json, json_object, regex, choice or grammar
    value: Any
    style: JsonStyle = USUAL
    strict: bool = True


class Form(NamedTuple):
    """The grammar of an answer, and the places of its schema that it is not held to."""

    grammar: Grammar
    relaxed: tuple[str, ...] = ()


async def asked_form(body: GenerationRequest, config: ServerConfig) -> Form | None:
    """The form, checked; None if any text will do. Raises InvalidRequest, naming the field."""
    if body.model_fields_set.isdisjoint(_FIELDS):
        return None  # nearly every request
    found = [*_from_response_format(body.response_format), *_from_structured_outputs(body)]
    found += _from_old_names(body)
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(wish.field for wish in found[:2])
        raise InvalidRequest(f"{names} exclude each other; leave one out.", param=found[1].field)
    (wish,) = found
    # A large one takes up to a second, which nobody else shall wait for.
    return await asyncio.to_thread(_form, wish, config)


def _form(wish: _Wish, config: ServerConfig) -> Form:
    relaxed: tuple[str, ...] = ()
    strict = wish.strict or config.strict_schemas
    if wish.kind == "json":
        limit = config.max_schema_bytes
        schema, relaxed = check_schema(wish.value, wish.field, strict=strict, max_bytes=limit)
        wish = wish._replace(value=schema)
    else:
        _check_bytes(wish, config.max_schema_bytes)
    try:
        text = _text(wish, lenient=False)
    except InvalidRequest as error:
        raise InvalidRequest(f"{wish.field}: {error}", param=wish.field) from error
    fault = VERDICTS.of(text).error
    if fault is None:
        return _told(wish, text, relaxed)
    if wish.kind == "json" and not strict:
        lenient = _text(wish, lenient=True)
        verdict = VERDICTS.of(lenient)
        if verdict.error is None:
            return _told(wish, lenient, (*relaxed, *_places(wish.value, verdict.warnings)))
        fault = verdict.error
    hint = " Leave it out, or set strict to false." if fault.startswith("Unimplemented") else ""
    raise InvalidRequest(f"{wish.field} cannot be enforced: {fault}.{hint}", param=wish.field)


def _places(schema: Any, warnings: tuple[str, ...]) -> list[str]:
    """Where a schema says what only the making of its grammar found not to hold."""
    if any(warning.startswith("oneOf") for warning in warnings):
        return places_of(schema, "oneOf")
    return keywords_of(warnings)


def _told(wish: _Wish, grammar: str, relaxed: tuple[str, ...]) -> Form:
    if relaxed:
        logger.debug("%s is not held to %s", wish.field, header_value(relaxed))
    return Form(Grammar(text=grammar), relaxed)


def _text(wish: _Wish, *, lenient: bool) -> str:
    match wish.kind:
        case "json":
            return json_form(wish.value, wish.style, lenient=lenient)
        case "json_object":
            return object_form(wish.style)
        case "regex":
            return regex_form(wish.value)
        case "choice":
            return choice_form(wish.value)
    return grammar_form(wish.value)


def _check_bytes(wish: _Wish, limit: int) -> None:
    value = wish.value
    size = len(value if isinstance(value, str) else json.dumps(value))
    if size > limit:
        raise InvalidRequest(
            f"{wish.field} has {size} bytes; at most {limit} are taken (--max-schema-bytes).",
            param=wish.field,
        )


# ---------------------------------------------------------------------------- the fields


def _from_response_format(wanted: Any) -> list[_Wish]:
    """OpenAI's. Raises InvalidRequest."""
    field = "response_format"
    if wanted is None:
        return []
    if not isinstance(wanted, dict) or "type" not in wanted:
        raise InvalidRequest(
            f"{field} must be an object with a type, such as {{'type': 'text'}}.", param=field
        )
    match wanted["type"]:
        case "text":
            return []
        case "json_object":
            return [_Wish(field, "json_object", None)]
        case "json_schema":
            return [_from_json_schema(wanted.get("json_schema"), f"{field}.json_schema")]
    raise InvalidRequest(
        f"{field}.type must be 'text', 'json_object' or 'json_schema'.", param=f"{field}.type"
    )


def _from_json_schema(wanted: Any, field: str) -> _Wish:
    if not isinstance(wanted, dict) or not isinstance(wanted.get("name"), str):
        raise InvalidRequest(f"{field} must be an object with a name and a schema.", param=field)
    schema, strict = wanted.get("schema", {"type": "object"}), wanted.get("strict")
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{field}.schema must be an object.", param=f"{field}.schema")
    if strict not in (None, True, False):
        raise InvalidRequest(f"{field}.strict must be true or false.", param=f"{field}.strict")
    return _Wish(f"{field}.schema", "json", schema, strict=bool(strict))


def _from_structured_outputs(body: GenerationRequest) -> list[_Wish]:
    """vLLM's. Raises InvalidRequest."""
    field, wanted = "structured_outputs", body.structured_outputs
    if wanted is None:
        return []
    if wanted.structural_tag is not None:
        raise Unsupported(
            f"{field}.structural_tag is not supported; json, regex, choice, grammar and "
            "json_object are.",
            param=f"{field}.structural_tag",
        )
    values = _given(wanted)
    if len(values) != 1:
        raise InvalidRequest(
            f"{field} must have exactly one of json, regex, choice, grammar and json_object.",
            param=field,
        )
    ((kind, value),) = values.items()
    return [_wish(f"{field}.{kind}", kind, value, _style(wanted))]


def _given(wanted: StructuredOutputs) -> dict[str, Any]:
    every = {
        "json": wanted.json_,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": wanted.json_object or None,
    }
    return {kind: value for kind, value in every.items() if value is not None}


def _style(wanted: StructuredOutputs) -> JsonStyle:
    white_space = USUAL.white_space
    if wanted.whitespace_pattern is not None:
        white_space = wanted.whitespace_pattern
    if wanted.disable_any_whitespace:
        white_space = None
    return JsonStyle(white_space, closed=bool(wanted.disable_additional_properties))


def _from_old_names(body: GenerationRequest) -> list[_Wish]:
    """vLLM's before, llama.cpp's and SGLang's. Empty texts and null ask nothing."""
    values = {name: getattr(body, name) for name in _OLD_NAMES}
    return [
        _wish(name, _OLD_NAMES[name], value, USUAL)
        for name, value in values.items()
        if value not in (None, "", [])
    ]


def _wish(field: str, kind: str, value: Any, style: JsonStyle) -> _Wish:
    """A schema may come as an object or as its text. Raises InvalidRequest."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not JSON: {error}.", param=field) from error
    if kind == "json" and not isinstance(value, Mapping | bool):
        raise InvalidRequest(f"{field} must be a JSON schema: an object.", param=field)
    return _Wish(field, kind, value, style)
