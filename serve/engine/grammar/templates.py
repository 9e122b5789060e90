"""Grammars compiled once, off the engine's thread, and kept: a request gets a copy."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serve.engine.grammar.vocabulary import Vocabulary
from serve.errors import InvalidRequest
from serve.sampling_params import Grammar

NUM_THREADS = 2
MAX_TEMPLATES = 256
"""Compiled grammars that are kept; one takes some 4 KB, and what its text takes."""

LIMITS = LLParserLimits(max_items_in_row=8_000, step_max_items=100_000)
"""Enough for 2,000 optional properties of one object, whose masks then take 40 ms; llguidance's own
limit is reached at 500."""


def fault_of(matcher: LLMatcher) -> str:
    """What a matcher in its error state says, without what only its authors can read."""
    fault = matcher.get_error().partition("\n<state>")[0].strip().rstrip(".")
    return "it admits no text at all" if fault.startswith("NoExtension") else fault


class Templates:
    """Grammar → the future of its matcher at the start. For one thread to ask."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._reading = Lock()

    def get(self, grammar: Grammar) -> Future[LLMatcher]:
        """Its matcher, once it is compiled; or an InvalidRequest that says why there is none."""
        future = self._kept.get(grammar)
        if future is None:
            future = self._kept[grammar] = self._pool.submit(self._compile, grammar)
            if len(self._kept) > MAX_TEMPLATES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return future

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._tokenizer(grammar.end_token_ids)
        matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a copy takes along what is worked out now
        if matcher.is_error():
            raise InvalidRequest(f"the form asked for cannot be used: {fault_of(matcher)}.")
        return matcher

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        with self._reading:
            if end_token_ids not in self._tokenizers:
                self._tokenizers[end_token_ids] = self._vocabulary(end_token_ids)
            return self._tokenizers[end_token_ids]
