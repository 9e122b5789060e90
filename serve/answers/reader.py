"""Reading an answer as it comes: reasoning, content and tool calls, by a model's AnswerFormat.

The parser is a generator that looks at one character after another and rests when the text so far
is used up, so what it says cannot depend on how the text was cut. A whole answer is read as a
stream of one piece. Nothing raises: what is no call of a given tool is content, as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

from serve.answers.cursor import Cursor, Step
from serve.answers.events import (
    AnswerEvent,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from serve.answers.format import AnswerFormat, CallFormat

_NAME_CHAR = re.compile(r"[\w.:-]")
_MAX_NAME_CHARS = 256


class AnswerReader(Cursor):
    """One answer's reader. `tools` are the names that the request gives."""

    def __init__(
        self, form: AnswerFormat, tools: Collection[str], *, in_reasoning: bool = False
    ) -> None:
        self._form = form
        self._tools = frozenset(tools)
        super().__init__()
        self._skip = 0  # from the mark: where to go on once it is known to be text
        self._held = ""  # white space that belongs to a marker, should one follow
        self._calls = 0
        self._said: list[tuple[type[Reasoning | Content] | int, list[str]] | AnswerEvent] = []
        self._parser = self._answer(in_reasoning)

    def push(self, text: str) -> list[AnswerEvent]:
        """What the next piece of text makes certain. Not to be called after finish."""
        self._append(text)
        return self._go_on()

    def finish(self) -> list[AnswerEvent]:
        """The rest, now that the text is over."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[AnswerEvent]:
        next(self._parser, None)
        said, self._said = self._said, []
        return [_event(*item) if isinstance(item, tuple) else item for item in said]

    def _say(self, kind: type[Reasoning | Content] | int, text: str) -> None:
        """A number is that of the call whose arguments these are."""
        if not text:
            return
        last = self._said[-1] if self._said else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self._said.append((kind, [text]))

    # The answer's parts

    def _answer(self, in_reasoning: bool) -> Step[None]:
        markers = self._form.reasoning
        if markers is not None and not in_reasoning:
            self._held = yield from self._space()
            in_reasoning = yield from self._literal(markers.open)
        if markers is not None and in_reasoning:
            self._held = ""
            yield from self._space()
            closer = yield from self._until((markers.close,), Reasoning)
            self._at += len(closer)
            self._held = ""
            yield from self._space()
        yield from self._content()
        while not self._ended:
            yield

    def _content(self) -> Step[None]:
        calls = self._form.calls if self._tools else None
        if calls is None:
            yield from self._until((), Content)
            return
        while not calls.open:  # calls without a marker stand only where the content begins
            space = yield from self._space()
            self._held += space
            if not (yield from self._call_or_text(calls, "")):
                calls = None
                break
        markers = () if calls is None else tuple(filter(None, (calls.section_open, calls.open)))
        while marker := (yield from self._until(markers, Content)):
            assert calls is not None
            yield from self._call_or_text(calls, marker)

    def _call_or_text(self, calls: CallFormat, marker: str) -> Step[bool]:
        """From a marker on. What turns out to be no call goes out as text, and what follows its
        marker is looked at again, so that a call after it is still one. Whether it was a call."""
        self._mark, self._skip = self._at, len(marker)
        self._at += len(marker)
        whole = yield from self._section(calls, marker)
        if self._mark is None:
            return True
        self._at = self._at if whole else self._mark + self._skip
        self._unmark()
        return False

    def _unmark(self) -> None:
        """What was read since the mark is text."""
        text, self._mark = self._text[self._mark : self._at], None
        if text:
            self._say(Content, self._held + text)
            self._held = ""

    def _section(self, calls: CallFormat, marker: str) -> Step[bool]:
        if marker and marker == calls.section_open:
            yield from self._space()
            if not (yield from self._literal(calls.open)):
                return False
        yield from self._space()
        read = {"json": self._object, "json_list": self._list, "tag_json": self._tagged}
        if not (yield from read[calls.kind](calls)):
            return False
        for closer in filter(None, (calls.close, calls.section_close)):
            space = yield from self._space()
            if not (yield from self._literal(closer)):
                self._at -= len(space)  # it may stand before a text, or before the next call
        return True

    def _list(self, calls: CallFormat) -> Step[bool]:
        """A list's call of an unknown tool is text; those beside it are calls."""
        if not (yield from self._literal("[")):
            return False
        while True:
            yield from self._space()
            if not (yield from self._object(calls)):
                return False
            yield from self._space()
            if not (yield from self._literal(",")):
                return (yield from self._literal("]"))
            if self._mark is not None:
                self._unmark()
            yield from self._space()
            self._mark, self._skip = self._at, 0

    def _tagged(self, calls: CallFormat) -> Step[bool]:
        name = ""
        while not (yield from self._literal(calls.name_end)):
            char = yield from self._peek()
            if not _NAME_CHAR.match(char) or len(name) == _MAX_NAME_CHARS:
                return False
            name += char
            self._at += 1
        yield from self._space()
        return (yield from self._arguments(name))

    def _arguments(self, name: str) -> Step[bool]:
        """An object, handed on as it comes if the tool is a given one."""
        if (yield from self._peek()) != "{":
            return False
        index = self._begin(name) if name in self._tools else None
        take: Callable[[str], object] = _pass_over if index is None else partial(self._say, index)
        if not (yield from self._value(take)):
            return False
        if index is not None:
            self._said.append(CallEnded(index))
        return True

    def _object(self, calls: CallFormat) -> Step[bool]:
        """`{"name": …, "arguments": {…}}`, its keys in any order, other keys passed over."""
        name, arguments, told = "", "", False
        more = yield from self._literal("{")
        while more:
            yield from self._space()
            key = yield from self._string()
            yield from self._space()
            if key is None or not (yield from self._literal(":")):
                return False
            yield from self._space()
            if key == calls.name_key and not name:
                name = (yield from self._string()) or ""
                if not name:
                    return False
            elif key == calls.arguments_key and name in self._tools and not told:
                told = True
                if not (yield from self._arguments(name)):
                    return False
            else:
                value = yield from self._any()
                if value is None or (key == calls.arguments_key and value[0] != "{"):
                    return False
                arguments = value if key == calls.arguments_key else arguments
            yield from self._space()
            more = yield from self._literal(",")
        if not name or not (yield from self._literal("}")):
            return False
        if name in self._tools and not told:
            index = self._begin(name)
            self._say(index, arguments or "{}")
            self._said.append(CallEnded(index))
        return True

    def _begin(self, name: str) -> int:
        """From here on it is a call, whatever follows."""
        self._held, self._mark = "", None
        index, self._calls = self._calls, self._calls + 1
        self._said.append(CallBegun(index, name))
        return index

    def _until(self, markers: Sequence[str], kind: type[Reasoning | Content]) -> Step[str]:
        """Says the text up to the first marker and returns that, which is next; empty: the end."""
        while True:
            position, marker = self._search(markers)
            text = self._held + self._text[self._at : position]
            said = text.rstrip()
            self._say(kind, said)
            self._held, self._at = text[len(said) :], position
            if marker:
                return marker
            if self._ended:
                if not self._calls:
                    self._say(kind, self._held)
                self._held = ""
                return ""
            yield

    def _search(self, markers: Sequence[str]) -> tuple[int, str]:
        """Where the first marker is; else, with no marker, where one may begin, or the end."""
        text, longest = self._text, max(map(len, markers), default=0)
        position = self._next_start(markers, self._at)
        while position < len(text):
            ahead = text[position : position + longest]
            if not self._ended and any(m != ahead and m.startswith(ahead) for m in markers):
                return position, ""
            found = [marker for marker in markers if ahead.startswith(marker)]
            if found:
                return position, max(found, key=len)
            position = self._next_start(markers, position + 1)
        return position, ""

    def _next_start(self, markers: Sequence[str], begin: int) -> int:
        """Where the first character of a marker stands, at C speed; else the text's length."""
        places = [self._text.find(marker[0], begin) for marker in markers]
        return min((place for place in places if place >= 0), default=len(self._text))


def _event(kind: type[Reasoning | Content] | int, pieces: list[str]) -> AnswerEvent:
    text = "".join(pieces)
    return CallArguments(kind, text) if isinstance(kind, int) else kind(text)


def _pass_over(_text: str) -> None:
    """For the arguments of a tool that is none: their text is said when they are over."""
