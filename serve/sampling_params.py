"""What a caller may ask of sampling and stopping: one frozen value per request.

Text-side wishes (`stop`, `skip_special_tokens`, …) are honoured in the front, token-side wishes in
the engine. End-of-sequence ids are not a separate notion behind the front: it puts them into
`stop_token_ids` unless `ignore_eos` is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by less would overflow (as in vLLM)."""


MAX_PATTERN_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """Ends an output whose last tokens are one pattern `min_count` times in a row.

    Patterns have `min_pattern_size` to `max_pattern_size` tokens; 0 at most means never.
    Raises InvalidRequest for a value out of range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        if not 0 <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            wanted = f"between 0 and {MAX_PATTERN_SIZE}"
            raise _invalid(f"{name}.max_pattern_size", self.max_pattern_size, wanted)
        if not 0 <= self.min_pattern_size <= max(1, self.max_pattern_size):
            wanted = "between 0 and max_pattern_size"
            raise _invalid(f"{name}.min_pattern_size", self.min_pattern_size, wanted)
        if self.min_count < 2:
            raise _invalid(f"{name}.min_count", self.min_count, "2 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The form that an answer must have: `text` in the Lark dialect of llguidance. A text may end
    with any of `end_token_ids` once it is complete; the front resolves them to the model's own."""

    text: str
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names and meaning are vLLM's.

    `top_k` 0 or -1 and `top_p` 1 mean off. `logprobs` n asks for the chosen token's log-probability
    and those of the n best; 0 gives the chosen one alone; None gives none.
    `max_tokens` None means up to the context's end; the front resolves it. A `grammar` wins over
    `min_tokens` and `ignore_eos`: a complete answer ends.
    Raises InvalidRequest, naming the field, for a value out of range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculative: bool = True  # False: none of its tokens are guessed, where the server does that
    # honoured by the front
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_detection: RepetitionDetection | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, math.inf, "0 or more")
        _check("top_p", self.top_p, 0.0, 1.0, "between 0 and 1")
        _check("min_p", self.min_p, 0.0, 1.0, "between 0 and 1")
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise _invalid("repetition_penalty", self.repetition_penalty, "a finite number above 0")
        if self.top_k < -1:
            raise _invalid("top_k", self.top_k, "0 or -1 (off), or 1 or more")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise _invalid("max_tokens", self.max_tokens, "0 or more")
        if self.min_tokens < 0 or self.min_tokens > (self.max_tokens or self.min_tokens):
            raise _invalid("min_tokens", self.min_tokens, "between 0 and max_tokens")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise _invalid("seed", self.seed, "a 64-bit integer")
        if any(s == "" for s in self.stop):
            raise InvalidRequest("stop must not hold an empty string; leave it out.", param="stop")
        if self.grammar is not None and self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids and a grammar exclude each other; leave one of them out.",
                param="allowed_token_ids",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise _invalid(name, value, "0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with no draw."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def uses_penalties(self) -> bool:
        """Whether sampling needs to know the tokens so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def _check(name: str, value: float, low: float, high: float, wanted: str) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(name, value, wanted)


def _invalid(name: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, not {value}.", param=name)
