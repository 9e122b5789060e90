"""Distributions of lengths, written as one word on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from serve.errors import ConfigError

Length = Callable[[Random], int]
"""Draws a length of at least 1."""

FORMS = "512, uniform:100:900, lognormal:MEDIAN:SIGMA, or a mix such as 128@0.8+4096@0.2"


def parse_length(text: str) -> Length:
    """A distribution from its text (see FORMS). Raises ConfigError."""
    try:
        return _mix(text) if "@" in text else _simple(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no length: write {FORMS}.") from error


def _simple(text: str) -> Length:
    kind, *numbers = text.split(":")
    if kind == "uniform":
        low, high = map(_whole, numbers)
        if low > high:
            raise ValueError
        return lambda rng: rng.randint(low, high)
    if kind == "lognormal":
        median, sigma = map(float, numbers)
        if not (median >= 1 and 0 <= sigma < math.inf):
            raise ValueError
        return lambda rng: max(1, round(median * math.exp(rng.gauss(0.0, sigma))))
    if numbers:
        raise ValueError
    length = _whole(kind)
    return lambda rng: length


def _mix(text: str) -> Length:
    """Simple distributions with weights."""
    parts = [part.rsplit("@", 1) for part in text.split("+")]
    lengths = [_simple(name) for name, _ in parts]
    weights = [float(weight) for _, weight in parts]
    if min(weights) < 0 or sum(weights) <= 0:
        raise ValueError
    return lambda rng: rng.choices(lengths, weights)[0](rng)


def _whole(text: str) -> int:
    length = int(text)
    if length < 1:
        raise ValueError
    return length
