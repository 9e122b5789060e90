"""Whether a form can be kept to, asked before a request begins: what cannot be is refused there."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from llguidance import LLMatcher

_MAX_VERDICTS = 1000
_MAX_FAULT_CHARS = 2000  # it quotes what is at fault, which may be all of a large grammar
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", re.MULTILINE)
_QUOTE = re.compile(r"^\s*(\d+ \||\^)")
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")


class Verdict(NamedTuple):
    """What is wrong with a grammar, if anything; and what of a lenient one is not held to."""

    error: str | None
    warnings: tuple[str, ...]


class Verdicts:
    """Those that were asked for lately. Threads may share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = Lock()

    def of(self, grammar: str) -> Verdict:
        """Takes milliseconds for a grammar that is new, seconds for a monstrous one."""
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            verdict = self._kept.get(key)
        if verdict is None:
            verdict = _judge(grammar)
            with self._lock:
                self._kept[key] = verdict
                if len(self._kept) > _MAX_VERDICTS:
                    self._kept.popitem(last=False)
        return verdict


VERDICTS = Verdicts()
"""Those of this process."""


def is_panic(error: BaseException) -> bool:
    """Whether llguidance has failed in itself: Rust's panics come as an exception of a type that
    cannot be imported, outside Exception."""
    return type(error).__name__ == "PanicException"


def keywords_of(warnings: tuple[str, ...]) -> list[str]:
    """The keywords of a schema that warnings say are not held to."""
    lists = [found for warning in warnings for found in _UNKNOWN.findall(warning)]
    words = [word.strip('" ') for found in lists for word in found.split(",")]
    return list(dict.fromkeys(words or warnings))


def _judge(grammar: str) -> Verdict:
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    except ValueError as error:
        return Verdict(str(error), ())
    except BaseException as error:
        if not is_panic(error):
            raise
        return Verdict("it cannot be compiled.", ())
    if is_error:
        lines = [line for line in messages[0].splitlines() if not _QUOTE.match(line)]
        return Verdict(_PLACE.sub("", "\n".join(lines)).strip()[:_MAX_FAULT_CHARS], ())
    return Verdict(None, tuple(messages))
