"""The grammar of answers that call tools."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.answers.known import CALLS
from serve.answers.tools import MAX_CALLS, Tool, ToolWish, calls_form
from serve.engine.grammar.vocabulary import TokenTable, vocabulary_of

HERMES = CALLS["hermes"]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["</tool_call>", "é\n"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = (Tool("add", ADD), Tool("stop", {"type": "object", "additionalProperties": False}))


@pytest.fixture(scope="module")
def by_bytes() -> LLTokenizer:
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]
    return vocabulary_of(TokenTable(tokens, [256], 256, lambda text: [*text.encode()]), [256])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


ONE, OTHER = call("add", '{"a": 1}'), call("stop", "{}")
TRICKY = call("add", '{"a": -5, "b": "</tool_call>"}')


@pytest.mark.parametrize(
    ("wish", "fits", "misfits"),
    [
        (
            ToolWish(TOOLS),
            ["", "Hello <b> & </tool_call>.", "a <tool", ONE, f"Well:\n{ONE}", f"{ONE}\n{OTHER}",
             TRICKY],
            [f"{ONE} and more", "x <tool_call>y", call("sub", "{}"), call("add", '{"b": 1}'),
             call("stop", '{"a": 1}'), "<tool_call>"],
        ),
        (
            ToolWish(TOOLS, must_call=True),
            [ONE, f"{ONE}\n{OTHER}\n{TRICKY}", "\n".join([OTHER] * MAX_CALLS)],
            ["", "Hello", f"Hm {ONE}", "\n".join([OTHER] * (MAX_CALLS + 1)), ONE[:-3]],
        ),
        (ToolWish(TOOLS, must_call=True, parallel=False), [ONE, OTHER], [f"{ONE}\n{OTHER}"]),
        (ToolWish(TOOLS, parallel=False), ["Hi", ONE], [f"{ONE}\n{OTHER}"]),
        (ToolWish(TOOLS[:1], must_call=True), [ONE], [OTHER]),
    ],
)  # fmt: skip
def test_every_call_is_one_of_a_given_tool_with_arguments_that_fit(
    by_bytes: LLTokenizer, wish: ToolWish, fits: list[str], misfits: list[str]
) -> None:
    grammar = calls_form(HERMES, wish)

    def admits(text: str) -> bool:
        matcher = LLMatcher(by_bytes, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in fits if not admits(text)] == []
    assert [text for text in misfits if admits(text)] == []
