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
from collections.abc import Sequence
from typing import NamedTuple

from serve.engine.stop_strings import StopStrings
from serve.engine.token_bytes import TokenBytes
from serve.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4


class TextDelta(NamedTuple):
    """Text that is final; `stopped_by` is the stop string that ended it.

    `num_tokens` is how many of the pushed ids the text needed: fewer after a stop string.
    """

    text: str
    stopped_by: str | None
    num_tokens: int


class Detokenizer:
    """One request's output as text.

    `prompt_token_ids` are those the output continues (a completion); without them the output is a
    text of its own (a chat answer), whose first token may lose its leading space. None of the
    prompt is ever shown, but a character that it left unfinished is completed.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        sampling: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokens = tokens
        self._hidden = tokens.special_ids if sampling.skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not any(map(self._counts, prompt_token_ids))
        self._prompt_tail_pending = self._continue_character(prompt_token_ids)
        self._mid_character = self._prompt_tail_pending  # bytes may be pending
        self._stops = (
            StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
            if sampling.stop
            else None
        )
        self._unarmed_tokens = sampling.min_tokens  # stop strings do not count before

    def push(self, token_ids: Sequence[int], *, final: bool) -> TextDelta:
        """Take the next ids; `final` when no more come, so that nothing stays pending.

        Not to be called again after `final` or a stop string.
        """
        if self._stops is None:
            return TextDelta(self._decode(token_ids, final), None, len(token_ids))
        parts: list[str] = []
        for i, token_id in enumerate(token_ids, 1):
            self._unarmed_tokens -= 1
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

    def _continue_character(self, prompt_token_ids: Sequence[int]) -> bool:
        """Feed the prompt's last bytes if they begin a character; whether they do."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id in self._hidden:
                continue
            tail = self._tokens.inside[token_id] + tail
            if len(tail) >= MAX_UTF8_BYTES:
                break
        self._utf8.decode(tail)
        pending, _ = self._utf8.getstate()
        return bool(pending)
