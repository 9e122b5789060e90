"""--speculative-config: JSON with vLLM's keys, read into one frozen value."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Self, get_args, get_type_hints

from serve.errors import ConfigError

FLAG = "--speculative-config"
METHODS = ("ngram", "suffix")
MOST_DRAFTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed. Names are vLLM's. Raises ConfigError for values that cannot work."""

    method: str
    num_speculative_tokens: int = 7  # most drafts of a request in a step; with its own, 8 rows
    prompt_lookup_min: int = 2  # ngram: fewest last tokens that must have occurred before
    prompt_lookup_max: int = 5  # ngram: and most that are looked for
    suffix_decoding_max_tree_depth: int = 24  # suffix: most last tokens that are compared
    suffix_decoding_max_cached_requests: int = 1000  # suffix: earlier answers that are searched
    suffix_decoding_max_spec_factor: float = 1.0  # suffix: drafts per token of the match
    suffix_decoding_min_token_prob: float = 0.1  # suffix: rarest continuation that is followed
    disable_by_batch_size: int | None = None  # no drafts while so many requests run, or more

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _wrong("method", self.method, f"one of {', '.join(METHODS)}")
        _between("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        _between("prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        _between("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _between("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2, 1024)
        cached = self.suffix_decoding_max_cached_requests
        _between("suffix_decoding_max_cached_requests", cached, 0, 1_000_000)
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        _between("suffix_decoding_max_spec_factor", factor, 0.01, 64)
        _between("suffix_decoding_min_token_prob", least, 0, 1)
        if self.disable_by_batch_size is not None:
            _between("disable_by_batch_size", self.disable_by_batch_size, 1, 1_000_000)

    @classmethod
    def read(cls, text: str) -> Self:
        """From JSON; null stands for a key that is left out. Raises ConfigError."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{FLAG}: is not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ConfigError(f'{FLAG}: must be an object such as {{"method": "ngram"}}.')
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"{FLAG}: has no key {key!r}; its keys are {', '.join(known)}.")
        if values.get("method") is None:
            raise ConfigError(f"{FLAG}: needs a method, one of {', '.join(METHODS)}.")
        given = {key: value for key, value in values.items() if value is not None}
        types = get_type_hints(cls)
        return cls(**{key: _typed(key, value, types[key]) for key, value in given.items()})


def _typed(key: str, value: Any, wanted: Any) -> Any:
    """A JSON value of the field's type; whole numbers are numbers, booleans are not."""
    (kind,) = (t for t in get_args(wanted) or (wanted,) if t is not type(None))
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        names = {int: "a whole number", float: "a number", str: "text"}
        raise _wrong(key, value, names[kind])
    return value


def _between(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _wrong(key, value, f"between {low} and {high}")


def _wrong(key: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {key} {value!r} is not possible: it must be {accepted}.")
