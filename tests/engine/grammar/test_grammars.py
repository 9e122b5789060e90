"""Requests with a grammar over the fake device: their tokens never depend on company either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from threading import Event

import llguidance.numpy
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import LLMatcher, LLTokenizer

from serve.engine.grammar.grammars import Grammars
from serve.engine.grammar.vocabulary import TokenTable, Vocabulary, vocabulary_of
from serve.messages import AbortRequests, AddRequest, FinishReason
from serve.sampling_params import Grammar, SamplingParams
from tests.fakes import VOCAB_SIZE, extend_hash, hash_tokens, next_token
from tests.strategies import (
    Arrival,
    Run,
    Workload,
    add_request,
    build,
    check_drained,
    drive,
    limits,
    random_workload,
    workloads,
)

END = VOCAB_SIZE - 1
TEXTS = [
    'start: "A" | "BC" | "BCD"',
    "start: /[0-9]{2,6}/",
    "start: /[0-9]+([A-F][0-9]+)*/",
    'start: "<" item+ ">"\nitem: "0" start "1" | /[2-5]/',
]


def vocabulary(ends: tuple[int, ...]) -> LLTokenizer:
    """Token i is the character 48 + i; the last one ends a text."""
    tokens = [*(bytes([48 + i]) for i in range(VOCAB_SIZE - 1)), b"<end>"]
    table = TokenTable(tokens, [END], END, lambda text: [ord(char) - 48 for char in text])
    return vocabulary_of(table, ends)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(vocabulary, VOCAB_SIZE)
    yield made
    made.close()


def grammar(text: str) -> Grammar:
    return Grammar(text=text, end_token_ids=(END,))


def reference(message: AddRequest) -> tuple[list[int], FinishReason]:
    """The fake model's answer, alone and one token at a time."""
    sampling = message.sampling
    assert sampling.max_tokens is not None
    matcher = None
    if sampling.grammar is not None:
        matcher = LLMatcher(vocabulary((END,)), sampling.grammar.text)
    value, answer = hash_tokens(message.prompt_token_ids), list[int]()
    while len(answer) < sampling.max_tokens:
        allowed = None if matcher is None else allowed_by(matcher)
        answer.append(next_token(value, allowed))
        value = extend_hash(value, answer[-1])
        if matcher is not None and (not matcher.consume_token(answer[-1]) or matcher.is_stopped()):
            assert not matcher.is_error()
            return answer, FinishReason.STOP
        if answer[-1] in sampling.stop_token_ids and len(answer) > sampling.min_tokens:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


def allowed_by(matcher: LLMatcher) -> list[int]:
    mask = llguidance.numpy.allocate_token_bitmask(1, VOCAB_SIZE)
    llguidance.numpy.fill_next_token_bitmask(matcher, mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def with_grammars(workload: Workload, rng: Random) -> Workload:
    """Most of its requests answer in a form; some of them want what a form overrules."""
    arrivals = []
    for arrival in workload.arrivals:
        message, text = arrival.message, rng.choice([*TEXTS, None])
        if text is not None:
            most = message.sampling.max_tokens or 0
            sampling = replace(
                message.sampling,
                grammar=grammar(text),
                min_tokens=rng.choice([0, most]),
                stop_token_ids=rng.choice([(), (END,)]),
            )
            message = replace(message, sampling=sampling)
        arrivals.append(replace(arrival, message=message))
    return replace(workload, arrivals=arrivals)


def check_forms(run: Run, arrivals: list[Arrival]) -> None:
    """Each got its sequential answer, or a beginning of it if it did not end by itself."""
    for arrival in arrivals:
        message = arrival.message
        got = run.completions.get(message.request_id, [])
        wanted, reason = reference(message)
        ended_by = run.reasons.get(message.request_id)
        if ended_by in (None, FinishReason.TIMEOUT):
            assert got == wanted[: len(got)]
        else:
            assert (got, ended_by) == (wanted, reason), message


@settings(max_examples=120, deadline=None)
@given(workloads())
def test_a_form_does_not_depend_on_company_depth_or_preemption(workload: Workload) -> None:
    arrivals = with_grammars(workload, Random(len(workload.arrivals))).arrivals
    grammars = Grammars(vocabulary, VOCAB_SIZE)
    try:
        run = drive(build(workload, grammars=grammars), arrivals)
    finally:
        grammars.close()
    check_forms(run, arrivals)
    check_drained(run)
    assert (grammars.num_compiling, grammars.num_followed) == (0, 0)


def test_the_workloads_have_what_matters(grammars: Grammars) -> None:
    """Preemption by both ways, several steps at once, and forms that end and that are cut."""
    seen = set()
    for seed in range(60):
        workload = with_grammars(random_workload(Random(seed)), Random(seed))
        run = drive(build(workload, grammars=grammars), workload.arrivals)
        stats = run.scheduler.stats()
        seen |= {("depth", workload.depth)} | {("ends", reason) for reason in run.reasons.values()}
        seen |= {("swap", stats.total_preemptions_swap > 0)}
        seen |= {("recompute", stats.total_preemptions_recompute > 0)}
    wanted = {("depth", 2), ("depth", 3), ("swap", True), ("recompute", True)}
    wanted |= {("ends", FinishReason.STOP), ("ends", FinishReason.LENGTH)}
    assert wanted <= seen


def serve(grammars: Grammars, *messages: AddRequest, depth: int = 1) -> Run:
    run = build(Workload(limits(), 64, 4, 0, depth), grammars=grammars)
    return drive(run, [Arrival(message, 0) for message in messages])


def test_a_complete_form_ends_whatever_else_is_asked(grammars: Grammars) -> None:
    message = add_request("r", 3, 20, grammar=grammar('start: "AB"'), min_tokens=20)
    run = serve(grammars, message)
    assert run.completions["r"] == [ord("A") - 48, ord("B") - 48]
    assert run.reasons["r"] is FinishReason.STOP


def test_a_moved_stream_goes_on_where_it_was_in_its_grammar(grammars: Grammars) -> None:
    message = add_request("r", 5, 9, grammar=grammar(TEXTS[2]))
    whole = serve(grammars, message).completions["r"]
    for num_known in range(1, len(whole) - 1):
        moved = replace(message, generated_token_ids=whole[:num_known])
        assert serve(grammars, moved).completions["r"] == whole[num_known:]


def test_n_choices_share_a_compiled_grammar_and_nothing_else(grammars: Grammars) -> None:
    messages = [add_request(f"r{i}", [i, 2, 3], 12, grammar=grammar(TEXTS[2])) for i in range(4)]
    run = serve(grammars, *messages, depth=2)
    check_forms(run, [Arrival(message, 0) for message in messages])


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(grammars: Grammars) -> None:
    run = build(Workload(limits(), 64, 4, 0, 1), grammars=grammars)
    run.core.handle(add_request("bad", 3, 5, grammar=grammar("start: nowhere")))
    run.core.handle(add_request("good", 3, 5))
    told = []
    while run.core.has_work():
        told += run.core.step()
    (bad,) = [delta for delta in told if delta.request_id == "bad"]
    assert bad.finish_reason is FinishReason.ERROR
    assert "nowhere" in (bad.error or "")
    assert bad.is_invalid
    assert sum(len(d.token_ids) for d in told if d.request_id == "good") == 5


class _Panic(BaseException):
    """As Rust's panics come."""


_Panic.__name__ = "PanicException"


class _Broken:
    """A matcher that fails in the middle."""

    def __init__(self, panics: bool) -> None:
        self._panics = panics
        self._is_broken = False

    def consume_tokens(self, token_ids: list[int]) -> bool:
        if self._panics:
            raise _Panic("index out of range")
        self._is_broken = True
        return False

    def is_error(self) -> bool:
        return self._is_broken

    def get_error(self) -> str:
        return "out of fuel"

    def is_stopped(self) -> bool:
        return self._is_broken

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        pass


@pytest.mark.parametrize("panics", [True, False])
def test_a_matcher_that_breaks_ends_its_request_alone(grammars: Grammars, panics: bool) -> None:
    run = build(Workload(limits(), 64, 4, 0, 2), grammars=grammars)
    run.core.handle(add_request("bad", 3, 6, grammar=grammar(TEXTS[1])))
    run.core.handle(add_request("good", 4, 6, grammar=grammar(TEXTS[2])))
    told = []
    while run.core.has_work():
        told += run.core.step()
        if "bad" in grammars._states and told:
            grammars._states["bad"].matcher = _Broken(panics)  # type: ignore[assignment]
    last = [delta for delta in told if delta.request_id == "bad"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "form" in (last.error or "")
    good = [t for delta in told if delta.request_id == "good" for t in delta.token_ids]
    assert good == reference(add_request("good", 4, 6, grammar=grammar(TEXTS[2])))[0]


def slow_vocabulary(released: Event) -> Vocabulary:
    def with_ends(ends: tuple[int, ...]) -> LLTokenizer:
        released.wait(30)
        return vocabulary(ends)

    return with_ends


def test_while_a_grammar_compiles_others_are_served_and_it_may_be_aborted() -> None:
    released = Event()
    grammars = Grammars(slow_vocabulary(released), VOCAB_SIZE)
    run = build(Workload(limits(), 64, 4, 0, 1), grammars=grammars)
    for name in ("first", "aborted"):
        run.core.handle(add_request(name, 3, 4, grammar=grammar('start: "AB"')))
    run.core.handle(add_request("plain", 3, 4))
    told = []
    for _ in range(20):
        told += run.core.step()
    assert {delta.request_id for delta in told} == {"plain"}
    run.core.handle(AbortRequests(["aborted"]))
    assert run.core.has_work()
    released.set()
    while run.core.has_work():
        told += run.core.step()
    assert {delta.request_id for delta in told} == {"plain", "first"}
    grammars.close()


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    released = Event()
    grammars = Grammars(slow_vocabulary(released), VOCAB_SIZE, timeout_s=0.0)
    run = build(Workload(limits(), 64, 4, 0, 1), grammars=grammars)
    run.core.handle(add_request("slow", 3, 4, grammar=grammar('start: "AB"')))
    told = []
    while run.core.has_work():
        told += run.core.step()
    released.set()
    (delta,) = told
    assert "longer than" in (delta.error or "")
    grammars.close()


def test_without_grammars_such_a_request_is_refused() -> None:
    run = build(Workload(limits(), 64, 4, 0, 1))
    run.core.handle(add_request("r", 3, 4, grammar=grammar('start: "AB"')))
    told = []
    while run.core.has_work():
        told += run.core.step()
    (delta,) = told
    assert delta.finish_reason is FinishReason.ERROR


def test_steps_without_grammars_make_no_mask(grammars: Grammars) -> None:
    masks = []
    run = build(Workload(limits(), 64, 4, 0, 1), grammars=grammars)
    run.core.handle(add_request("r", 3, 4))
    while run.core.has_work():
        run.core.step()
        masks += list(run.executor.masks.values())
    assert set(masks) <= {None}


def test_a_grammar_and_allowed_tokens_exclude_each_other() -> None:
    with pytest.raises(Exception, match="exclude"):
        SamplingParams(grammar=Grammar(text="start: A"), allowed_token_ids=(1,))
