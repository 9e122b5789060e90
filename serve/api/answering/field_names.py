"""Errors of the chat path in the words of the API that was asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from serve.errors import RequestError


@contextmanager
def fields_named(names: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Errors from within name the field at fault as the caller's request does, in the sentence too.

    `names` gives fields' names, or those of paths, of which the longest that fits counts.
    """
    try:
        yield
    except RequestError as error:
        _rename(error, names())
        raise


def _rename(error: RequestError, names: Mapping[str, str]) -> None:
    path = error.param or ""
    known, rest = path, ""
    while known not in names:
        known, dot, last = known.rpartition(".")
        if not dot:
            return
        rest = f".{last}{rest}"
    error.param = names[known] + rest
    # A name that is a word of English as well is one only where the sentence begins with it.
    is_word = path.isalpha()
    where = rf"^{path}\b" if is_word else rf"\b{re.escape(path)}\b"
    sentence = re.sub(where, lambda _: error.param or "", str(error))
    error.args = (sentence, *error.args[1:])
