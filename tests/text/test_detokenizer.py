"""Streamed text is the whole text, byte for byte, whatever the tokenizer and the grouping."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from serve.sampling_params import SamplingParams
from serve.text.detokenizer import Detokenizer, text_plan
from serve.text.token_bytes import TokenBytes
from tests.text.tiny_tokenizers import KINDS, byte_level, sentencepiece

BACKENDS = {name: make() for name, make in KINDS.items()}
TOKENS = {name: TokenBytes(backend) for name, backend in BACKENDS.items()}
BYTE_LEVEL, SENTENCEPIECE = TOKENS["byte-level"], TOKENS["sentencepiece"]
NUM_BYTE_TOKENS = 256
CUTS = st.lists(st.integers(1, 4), min_size=1)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Random ids: special, added and unknown ones too. Byte tokens of a sentencepiece vocabulary
    come as whole characters (for others its own decoder shows one U+FFFD per byte)."""
    backend = BACKENDS[kind]
    any_id = st.integers(0, backend.get_vocab_size() + 2)
    if kind != "sentencepiece":
        return st.lists(any_id, max_size=30)
    first = backend.token_to_id("<0x00>")
    byte_ids = range(first, first + NUM_BYTE_TOKENS)
    others = [i for i in range(backend.get_vocab_size() + 3) if i not in byte_ids]
    other = st.sampled_from(others).map(lambda i: [i])
    character = st.characters(codec="utf-8").map(lambda c: [first + byte for byte in c.encode()])
    return st.lists(other | character, max_size=20).map(lambda parts: [*chain(*parts)])


def stream(
    tokens: TokenBytes,
    token_ids: list[int],
    cuts: list[int],
    prompt: list[int] | None = None,
    **sampling: Any,
) -> str:
    """All the text, pushed in groups of the sizes in `cuts`, over and over."""
    detokenizer = Detokenizer(text_plan(tokens, SamplingParams(**sampling), prompt or []))
    out, rest, turn = "", token_ids, 0
    while rest:
        size = cuts[turn % len(cuts)]
        group, rest, turn = rest[:size], rest[size:], turn + 1
        delta = detokenizer.push(group, final=False)
        out += delta.text
        if delta.stopped_by is not None:
            return out
    return out + detokenizer.push([], final=True).text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_streamed_text_equals_the_whole_decode(
    kind: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    token_ids = data.draw(ids_of(kind))
    whole = BACKENDS[kind].decode(token_ids, skip_special_tokens=skip)
    assert stream(TOKENS[kind], token_ids, cuts, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "wordpiece", "metaspace"])
@given(data=st.data(), cuts=CUTS)
def test_tok_01_a_continuation_is_decode_of_all_minus_decode_of_the_prompt(
    kind: str, data: st.DataObject, cuts: list[int]
) -> None:
    backend = BACKENDS[kind]
    prompt, output = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    before, whole = backend.decode(prompt), backend.decode(prompt + output)
    unfinished = before.endswith("\ufffd") and not whole.startswith(before)
    expected = whole[len(before) - unfinished :]
    got = stream(TOKENS[kind], output, cuts, prompt)
    # A character that the prompt left unfinished and the output did not complete is the prompt's.
    assert got in {expected, expected.removeprefix("\ufffd")}


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tok_01_spaces_survive_at_the_start_and_in_runs(make: Any) -> None:
    backend: Backend = make()
    text = "a    b\n  c d"
    token_ids = backend.encode(text, add_special_tokens=False).ids
    assert stream(TokenBytes(backend), token_ids, [1]) == text
    prompt = backend.encode("hello", add_special_tokens=False).ids
    space = backend.token_to_id("Ġ") or backend.token_to_id("▁")
    assert stream(TokenBytes(backend), [space, *token_ids], [1], prompt).startswith(" ")


def byte_ids(text: str) -> list[int]:
    """One token per byte, byte-level."""
    of_byte = {BYTE_LEVEL.inside[i]: i for i in range(NUM_BYTE_TOKENS)}
    return [of_byte[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_str_05_a_prompt_that_ends_inside_a_character_is_completed_and_never_shown(
    num_bytes: int,
) -> None:
    emoji = byte_ids("😀")
    prompt = byte_ids("Hello world ") + emoji[:num_bytes]
    assert stream(BYTE_LEVEL, emoji[num_bytes:] + byte_ids("ok"), [1], prompt) == "😀ok"


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_str_05_a_prompt_character_that_is_never_completed_shows_nothing(num_bytes: int) -> None:
    prompt = byte_ids("Hello world ") + byte_ids("😀")[:num_bytes]
    assert stream(BYTE_LEVEL, byte_ids(" ok"), [1], prompt) == " ok"
    assert stream(BYTE_LEVEL, [], [1], prompt) == ""


@pytest.mark.parametrize("tokens", [BYTE_LEVEL, SENTENCEPIECE])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_str_06_an_incomplete_tail_gives_one_replacement(
    tokens: TokenBytes, num_bytes: int
) -> None:
    of_byte = {tokens.inside[i]: i for i in range(NUM_BYTE_TOKENS + 3)}
    tail = [of_byte[bytes([byte])] for byte in "😀".encode()[:num_bytes]]
    detokenizer = Detokenizer(text_plan(tokens, SamplingParams()))
    assert detokenizer.push(tail, final=False).text == ""
    assert detokenizer.push([], final=True).text == "\ufffd"


def test_str_06_a_token_with_a_space_decides_the_pending_bytes_and_loses_nothing() -> None:
    first_of_three = byte_ids("€")[:1]
    detokenizer = Detokenizer(text_plan(BYTE_LEVEL, SamplingParams()))
    assert detokenizer.push(first_of_three, final=False).text == ""
    assert detokenizer.push(byte_ids(" w"), final=False).text == "\ufffd w"


def test_text_is_held_until_its_character_is_whole() -> None:
    detokenizer = Detokenizer(text_plan(BYTE_LEVEL, SamplingParams()))
    texts = [detokenizer.push([token_id], final=False).text for token_id in byte_ids("a€b")]
    assert texts == ["a", "", "", "€", "b"]


@given(st.text("ab. é", max_size=30), st.lists(st.text("ab.é ", min_size=1, max_size=4)), CUTS)
def test_streamed_text_stops_before_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    got = stream(BYTE_LEVEL, byte_ids(text), cuts, stop=tuple(stops))
    ends = (
        [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))] if stops else []
    )
    if not ends:
        assert got == text
    else:
        found = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert got == text[: ends[0] - len(found)]


def test_a_stop_string_reports_how_many_tokens_it_took() -> None:
    detokenizer = Detokenizer(text_plan(BYTE_LEVEL, SamplingParams(stop=("b c",))))
    delta = detokenizer.push(byte_ids("a b c d"), final=False)
    assert (delta.text, delta.stopped_by, delta.num_tokens) == ("a ", "b c", 5)


def test_a_stop_string_can_be_included() -> None:
    sampling = {"stop": ("b c",), "include_stop_str_in_output": True}
    assert stream(BYTE_LEVEL, byte_ids("a b c d"), [2], **sampling) == "a b c"


def test_stop_strings_do_not_count_within_min_tokens() -> None:
    assert stream(BYTE_LEVEL, byte_ids("a.a.a."), [3], stop=(".",), min_tokens=3) == "a.a"


def test_a_stop_string_may_end_in_the_flushed_tail() -> None:
    detokenizer = Detokenizer(text_plan(BYTE_LEVEL, SamplingParams(stop=("x\ufffd",))))
    delta = detokenizer.push([*byte_ids("ax"), *byte_ids("€")[:1]], final=True)
    assert (delta.text, delta.stopped_by) == ("a", "x\ufffd")
