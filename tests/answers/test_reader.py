"""Reading answers: every cut says the same, nothing is lost, what is no call is content."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.answers.events import (
    AnswerEvent,
    Call,
    CallArguments,
    CallBegun,
    Content,
    Reasoning,
    calls_among,
)
from serve.answers.format import AnswerFormat, CallFormat, Markers
from serve.answers.known import CALLS, REASONING
from serve.answers.reader import AnswerReader

TOOLS = ("now", "write", "add")
HERMES = AnswerFormat(REASONING["qwen3"], CALLS["hermes"])


@dataclass(frozen=True)
class Answer:
    """All that a reader said, joined."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def joined(events: list[AnswerEvent]) -> Answer:
    """A whole answer is its stream put together: there is no second way to read one."""
    return Answer(
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        calls_among(events),
    )


def events_of(
    form: AnswerFormat, pieces: list[str], *, in_reasoning: bool = False
) -> list[AnswerEvent]:
    reader = AnswerReader(form, TOOLS, in_reasoning=in_reasoning)
    return [event for piece in pieces for event in reader.push(piece)] + reader.finish()


def read(form: AnswerFormat, text: str, *, in_reasoning: bool = False) -> Answer:
    """Whole, by single characters and in two pieces at every place: all must say the same."""
    answer = joined(events_of(form, [text], in_reasoning=in_reasoning))
    cuts = [[text[:cut], text[cut:]] for cut in range(len(text))]
    for pieces in [list(text), *cuts]:
        assert joined(events_of(form, pieces, in_reasoning=in_reasoning)) == answer, pieces
    return answer


def written(form: CallFormat, calls: list[tuple[str, str]]) -> str:
    """The calls as a model of this family writes them."""
    if form.kind == "tag_json":
        texts = [f"{form.open}{name}{form.name_end}{body}{form.close}" for name, body in calls]
        return form.section_open + "".join(texts) + form.section_close
    bodies = [
        f'{{"{form.name_key}": {json.dumps(name)}, "{form.arguments_key}": {body}}}'
        for name, body in calls
    ]
    if form.kind == "json_list":
        return f"{form.open}[{', '.join(bodies)}]{form.close}"
    return "\n".join(f"{form.open}\n{body}\n{form.close}" for body in bodies)


BODIES = (
    "{}",
    '{"a": [1, -2.5e3, true, null], "b": {"c": "é \\u00e9 \\" } ] \\\\"}}',
    '{"s": "end with </tool_call> please, or [TOOL_CALLS] or <think>"}',
)


@pytest.mark.parametrize("family", CALLS)
def test_every_family_reads_its_calls_at_every_cut(family: str) -> None:
    form = AnswerFormat(None, CALLS[family])
    calls = [("write", body) for body in BODIES]
    answer = read(form, written(CALLS[family], calls))
    assert answer == Answer("", "", tuple(Call(name, body, True) for name, body in calls))


@pytest.mark.parametrize("family", [name for name, form in CALLS.items() if form.open])
def test_content_before_a_call_is_kept(family: str) -> None:
    text = "I will, a < b [x].\n\n" + written(CALLS[family], [("now", "{}")])
    answer = read(AnswerFormat(None, CALLS[family]), text)
    assert answer == Answer("", "I will, a < b [x].", (Call("now", "{}", True),))


def test_ans_01_a_closing_tag_inside_a_string_ends_nothing() -> None:
    body = '{"s":"end with </tool_call> please"}'
    text = f'<tool_call>\n{{"name":"write","arguments":{body}}}\n</tool_call>'
    assert read(HERMES, text) == Answer("", "", (Call("write", body, True),))


@pytest.mark.parametrize("arguments", [',"arguments":{}', ""])
def test_ans_02_a_call_without_parameters_has_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>\n{{"name":"now"{arguments}}}\n</tool_call>'
    assert read(HERMES, text) == Answer("", "", (Call("now", "{}", True),))


def test_ans_03_in_two_pieces_name_and_arguments_are_said_once() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"a": 1}}</tool_call>'
    for cut in range(len(text)):
        events = events_of(HERMES, [text[:cut], text[cut:]])
        assert sum(isinstance(event, CallBegun) for event in events) == 1
        pieces = [event.text for event in events if isinstance(event, CallArguments)]
        assert "".join(pieces) == '{"a": 1}'


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(HERMES, TOOLS)
    reader.push('<tool_call>{"name": "write", "arguments": ')
    assert reader.push('{"s": "ab')[-1] == CallArguments(0, '{"s": "ab')
    assert reader.push("c") == [CallArguments(0, "c")]


def test_ans_09_what_is_cut_while_thinking_is_reasoning() -> None:
    assert read(HERMES, "so the user ", in_reasoning=True) == Answer("so the user ", "", ())
    assert read(HERMES, "<think>\nso </thi") == Answer("so </thi", "", ())


def test_ans_11_two_calls_have_indices_0_and_1() -> None:
    text = written(CALLS["hermes"], [("now", "{}"), ("add", '{"x":1}')])
    begun = [event for event in events_of(HERMES, list(text)) if isinstance(event, CallBegun)]
    assert begun == [CallBegun(0, "now"), CallBegun(1, "add")]


def test_reasoning_content_and_calls_are_told_apart() -> None:
    text = "<think>\nhm\n</think>\n\nSure.\n" + written(CALLS["hermes"], [("now", "{}")])
    assert read(HERMES, text) == Answer("hm", "Sure.", (Call("now", "{}", True),))


def test_a_second_closing_marker_of_reasoning_is_content() -> None:
    assert read(HERMES, "a</think>b</think>c", in_reasoning=True) == Answer("a", "b</think>c", ())


@pytest.mark.parametrize(
    "text",
    [
        "the marker <tool_call> in prose",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": 3}</tool_call>',
        '<tool_call>{"name": now}</tool_call>',
        '<tool_call>{"name": "no',
        "  <tool_cal",
        "",
    ],
)
def test_what_is_no_call_is_content_verbatim(text: str) -> None:
    assert read(AnswerFormat(None, CALLS["hermes"]), text) == Answer("", text, ())


def test_an_unknown_tool_does_not_harm_its_neighbours() -> None:
    calls = [("unknown", "{}"), ("now", "{}"), ("other", "{}"), ("add", "{}")]
    for family in ("hermes", "mistral", "deepseek_v31"):
        answer = read(AnswerFormat(None, CALLS[family]), written(CALLS[family], calls))
        assert [call.name for call in answer.calls] == ["now", "add"]
        assert "unknown" in answer.content
        assert "other" in answer.content


def test_a_call_that_breaks_stands_with_what_was_said_and_the_rest_is_content() -> None:
    answer = read(HERMES, '<tool_call>{"name": "write", "arguments": {"a": oops}} and on')
    assert answer.calls == (Call("write", '{"a": oops', False),)
    assert answer.content == "}} and on"


def test_name_after_arguments() -> None:
    text = '<tool_call>{"id": 7, "arguments": {"a": [1]}, "name": "write"}</tool_call>'
    assert read(HERMES, text) == Answer("", "", (Call("write", '{"a": [1]}', True),))


def test_without_tools_a_call_is_content() -> None:
    text = written(CALLS["hermes"], [("now", "{}")])
    reader = AnswerReader(HERMES, ())
    assert joined(reader.push(text) + reader.finish()) == Answer("", text, ())


_PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "[TOOL_CALLS]"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "now<｜tool▁sep｜>", "functools"),
        *('{"name":"now"', ',"arguments":', '{"name":"write","arguments":{"a":"'),
        *("[", "]", "{}", "}", '"', "\\", "x", "é", ",", "1", " ", "\n"),
    ]
)


@given(st.lists(_PARTS, max_size=14), st.sampled_from(sorted(CALLS)), st.booleans())
def test_whatever_is_written_every_cut_reads_the_same(
    parts: list[str], family: str, thinking: bool
) -> None:
    read(
        AnswerFormat(Markers("<think>", "</think>"), CALLS[family]),
        "".join(parts),
        in_reasoning=thinking,
    )


@given(st.lists(_PARTS, max_size=14), st.sampled_from(sorted(CALLS)))
def test_without_a_call_all_text_is_content(parts: list[str], family: str) -> None:
    text = "".join(parts)
    answer = read(AnswerFormat(None, CALLS[family]), text)
    if not answer.calls:
        assert answer.content == text
