"""Ids → text, as they come: one incremental state per request.

Tokens become bytes (`TokenBytes`), bytes become characters through an incremental UTF-8 decoder
that keeps an unfinished character until the next bytes decide it (tokens of whole characters go
past it), and `StopStrings` holds back what
might be a stop string. Joined, the pieces equal the whole text byte for byte, however the ids were
grouped, because each stage carries its whole state along.

Two other ways were tried. `tokenizers.decoders.DecodeStream` (2 µs a token) cannot give up an
unfinished tail at the end of a run and refuses ids whose bytes turn out invalid. Decoding a window
of ids twice and taking the difference (30 µs a token) shows byte-fallback bytes one U+FFFD each.
Both lose the bytes that logprobs need. This takes under 1 µs a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve.sampling_params import SamplingParams
from serve.text.stop_strings import StopString, StopStrings
from serve.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4


class TextDelta(NamedTuple):
    """Text that is final; `stopped_by` is the stop string that ended it.

    `num_tokens` is how many of the pushed ids the text needed: fewer after a stop string.
    """

    text: str
    stopped_by: str | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextPlan:
    """How the texts of one prompt's choices are written: worked out once, shared by them all."""

    tokens: TokenBytes
    hidden: frozenset[int]
    at_start: bool  # the first token shown is the first of a text, and may lose its leading space
    unfinished: bytes  # the prompt's last bytes, which may begin a character
    stops: tuple[StopString, ...]
    stop_tokens: Mapping[int, str]  # hidden tokens whose text is one of the stop strings
    include_stop: bool
    min_tokens: int


def text_plan(
    tokens: TokenBytes, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()
) -> TextPlan:
    """The plan for an output that continues these ids (a completion); without them it is a text of
    its own (a chat answer). None of the prompt is ever shown, but a character that it left
    unfinished is completed."""
    hidden = tokens.special_ids if sampling.skip_special_tokens else frozenset()
    shown = (i for i in reversed(prompt_token_ids) if i not in hidden)
    stop_ids = {text: tokens.special_id(text) for text in sampling.stop}
    return TextPlan(
        tokens=tokens,
        hidden=hidden,
        at_start=not any(i not in hidden and tokens.knows(i) for i in prompt_token_ids),
        unfinished=_last_bytes(tokens, shown),
        stops=tuple(map(StopString, sampling.stop)),
        stop_tokens={i: text for text, i in stop_ids.items() if i is not None and i in hidden},
        include_stop=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )


def _last_bytes(tokens: TokenBytes, ids_backwards: Iterable[int]) -> bytes:
    """As many of a text's last bytes as one character can have, and those of their tokens."""
    tail = b""
    for token_id in ids_backwards:
        tail = tokens.inside[token_id] + tail
        if len(tail) >= MAX_UTF8_BYTES:
            break
    return tail


class Detokenizer:
    """One request's output as text."""

    def __init__(self, plan: TextPlan) -> None:
        self._tokens = plan.tokens
        self._hidden = plan.hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = plan.at_start
        self._utf8.decode(plan.unfinished)
        self._prompt_tail_pending = self._utf8.getstate()[0] != b""
        self._mid_character = self._prompt_tail_pending  # bytes may be pending
        self._stops = StopStrings(plan.stops, include=plan.include_stop) if plan.stops else None
        self._stop_tokens = plan.stop_tokens
        self._includes_stop = plan.include_stop
        self._unarmed_tokens = plan.min_tokens  # stop strings do not count before

    def push(self, token_ids: Sequence[int], *, final: bool) -> TextDelta:
        """Take the next ids; `final` when no more come, so that nothing stays pending.

        Not to be called again after `final` or a stop string.
        """
        if self._stops is None:
            return TextDelta(self._decode(token_ids, final), None, len(token_ids))
        parts: list[str] = []
        for i, token_id in enumerate(token_ids, 1):
            self._unarmed_tokens -= 1
            if token_id in self._stop_tokens and self._unarmed_tokens < 0:
                return self._stopped_at(token_id, parts, i)
            text = self._decode((token_id,), final and i == len(token_ids))
            scan = self._stops.scan(text, armed=self._unarmed_tokens < 0)
            parts.append(scan.text)
            if scan.stop is not None:
                return TextDelta("".join(parts), scan.stop, i)
        if final:
            scan = self._stops.scan(self._utf8_tail(), armed=self._unarmed_tokens < 0)
            parts += [scan.text, self._stops.flush()]
            return TextDelta("".join(parts), scan.stop, len(token_ids))
        return TextDelta("".join(parts), None, len(token_ids))

    def _stopped_at(self, token_id: int, parts: Sequence[str], num_tokens: int) -> TextDelta:
        """A hidden token ends the text, which never shows the stop string that the token is."""
        assert self._stops is not None
        stop = self._stop_tokens[token_id]
        tail = self._stops.scan(self._utf8_tail(), armed=False).text + self._stops.flush()
        shown = stop if self._includes_stop else ""
        return TextDelta("".join(parts) + tail + shown, stop, num_tokens)

    def _decode(self, token_ids: Sequence[int], final: bool) -> str:
        tokens, hidden = self._tokens, self._hidden
        if len(token_ids) == 1 and not (self._mid_character or self._at_start):
            (token_id,) = token_ids
            text = "" if token_id in hidden else tokens.texts[token_id]
            if text is not None:
                return text
        if self._at_start:
            pieces = self._first_pieces(token_ids)
        else:
            pieces = [tokens.inside[token_id] for token_id in token_ids if token_id not in hidden]
        text = self._utf8.decode(b"".join(pieces), final)
        self._mid_character = self._utf8.getstate()[0] != b""
        if self._prompt_tail_pending and text:
            self._prompt_tail_pending = False
            return text.removeprefix(REPLACEMENT)  # the prompt's own unfinished character
        return text

    def _first_pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        shown = [token_id for token_id in token_ids if self._counts(token_id)]
        if not shown:
            return []
        self._at_start = False
        return [self._tokens.leading[shown[0]], *(self._tokens.inside[i] for i in shown[1:])]

    def _counts(self, token_id: int) -> bool:
        """Whether a text that has this token is no longer at its start."""
        return token_id not in self._hidden and self._tokens.knows(token_id)

    def _utf8_tail(self) -> str:
        """The replacement of bytes still pending; empty when the last ids were decoded as final."""
        return self._decode((), True)
