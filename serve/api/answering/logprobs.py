"""Log-probabilities in the API's two forms (and vLLM's for prompts).

A token is named by its own text, never by its neighbours'. A token that holds only part of a
character is named by its bytes (`bytes:\\xe2\\x80`), so that names stay distinct; the `bytes` of
consecutive tokens join to the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.messages import TokenLogprobs
from serve.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for a probability of zero, whose logarithm JSON cannot say (OpenAI's choice)."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are shown in an answer."""

    tokenizer: Tokenizer
    as_ids: bool  # `token_id:17`, on request
    skip_special: bool  # the text leaves special tokens out

    def name(self, token_id: int, *, leads: bool = False) -> str:
        """Text, bytes or id. `leads`: the token begins the text, where some lose their space."""
        if self.as_ids:
            return f"token_id:{token_id}"
        if leads:
            try:
                return self.tokenizer.tokens.leading[token_id].decode()
            except UnicodeDecodeError:
                pass  # named by its bytes, as anywhere else
        return self.tokenizer.token_text(token_id)

    def text_bytes(self, token_id: int, *, leads: bool = False) -> bytes:
        """What the token adds to the text."""
        if self.hides(token_id):
            return b""
        tokens = self.tokenizer.tokens
        return tokens.leading[token_id] if leads else tokens.inside[token_id]

    def hides(self, token_id: int) -> bool:
        """Whether the text leaves the token out."""
        return self.skip_special and token_id in self.tokenizer.tokens.special_ids


def finite(logprob: float) -> float:
    """A number JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST


class ChatLogprobsWriter:
    """`choices[].logprobs` of one chat answer, in one piece or many."""

    def __init__(self, num_top: int, names: TokenNames) -> None:
        self._num_top = num_top
        self._names = names
        self._leads = True

    def generated(self, entries: Sequence[TokenLogprobs], *, hides_last: bool) -> dict[str, Any]:
        """The next tokens. `hides_last`: the last one ended the text and is not part of it."""
        content = [self._entry(entry) for entry in entries]
        if hides_last:
            content[-1]["bytes"] = None
        return {"content": content, "refusal": None}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[: self._num_top]
        result = {
            **self._candidate(entry.token_id, entry.logprob),
            "top_logprobs": [self._candidate(token_id, value) for token_id, value in top],
        }
        self._leads = self._leads and self._names.hides(entry.token_id)
        return result

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._names.text_bytes(token_id, leads=self._leads)
        return {
            "token": self._names.name(token_id, leads=self._leads),
            "logprob": finite(logprob),
            "bytes": list(raw) if raw else None,
        }


class CompletionLogprobsWriter:
    """`choices[].logprobs` of one completion, in one piece or many: it keeps the text offset.

    `leads`: the first token begins the text, because the prompt is echoed.
    """

    def __init__(self, num_top: int, names: TokenNames, *, leads: bool) -> None:
        self._num_top = num_top
        self._names = names
        self._leads = leads
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The echoed prompt: its first token has no probability."""
        return self._write(list(prompt_ids), [None, *entries])

    def generated(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens."""
        return self._write([entry.token_id for entry in entries], entries)

    def nothing(self) -> dict[str, Any]:
        """No tokens."""
        return self._write([], [])

    def _write(
        self, token_ids: list[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        assert len(token_ids) == len(entries), (len(token_ids), len(entries))
        result: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in zip(token_ids, entries, strict=True):
            result["tokens"].append(self._names.name(token_id, leads=self._leads))
            result["token_logprobs"].append(finite(entry.logprob) if entry else None)
            result["top_logprobs"].append(self._top(entry) if entry else None)
            result["text_offset"].append(self._offset)
            raw = self._names.text_bytes(token_id, leads=self._leads)
            self._offset += len(self._decoder.decode(raw))
            self._leads = self._leads and self._names.hides(token_id)
        return result

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[: self._num_top]
        pairs = [*top, (entry.token_id, entry.logprob)]
        return {self._names.name(token_id): finite(value) for token_id, value in pairs}


def prompt_candidates(entry: TokenLogprobs, names: TokenNames) -> dict[int, dict[str, Any]]:
    """One entry of vLLM's `prompt_logprobs`: the candidates by id, the prompt's own among them."""
    ranked = zip(entry.top_token_ids, entry.top_logprobs, range(1, 10**6), strict=False)
    rows = [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    return {
        token_id: {"logprob": finite(value), "rank": rank, "decoded_token": names.name(token_id)}
        for token_id, value, rank in rows
    }
