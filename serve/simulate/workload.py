"""The requests of a simulation: read from a file, or drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from serve.errors import ConfigError
from serve.messages import AddRequest
from serve.sampling_params import SamplingParams
from serve.simulate.lengths import parse_length

Piece = tuple[int, int]
"""(key, length): prompts that begin with the same pieces share that prefix."""

MOONCAKE_BLOCK = 512
"""Tokens per hash id in the files of the Mooncake traces, which name no block size."""

_TOKEN_RANGE = 2**31


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request; times in seconds from the start. Its tokens are made when it arrives."""

    arrival_s: float
    pieces: tuple[Piece, ...]
    output_len: int
    priority: int = 0
    user: str | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return sum(length for _, length in self.pieces)

    def message(self, request_id: str) -> AddRequest:
        """What the engine is sent."""
        return AddRequest(
            request_id,
            [token for key, length in self.pieces for token in _tokens(key, length)],
            SamplingParams(max_tokens=self.output_len, temperature=0.0),
            self.arrival_s,
            priority=self.priority,
            client=self.user or "",
        )


def _tokens(key: int, length: int) -> range:
    """A run of token ids that belongs to a key: multiplicative hashing spreads keys apart."""
    start = key * 2_654_435_761 % (_TOKEN_RANGE - length)
    return range(start, start + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """A drawn workload: Poisson arrivals, lengths from distributions, some shared prefixes."""

    num_requests: int
    rate: float  # requests per second; 0: all at the start
    prompt_len: str
    output_len: str
    prefix_len: int = 0  # tokens before the prompt's own, shared with other requests
    num_prefixes: int = 1
    seed: int = 0


def draw(settings: Synthetic) -> list[SimRequest]:
    """The same requests for the same settings. Raises ConfigError."""
    rng = Random(settings.seed)
    prompt_len, output_len = parse_length(settings.prompt_len), parse_length(settings.output_len)
    now, requests = 0.0, []
    for number in range(settings.num_requests):
        if settings.rate > 0:
            now += rng.expovariate(settings.rate)
        own = (settings.num_prefixes + number, prompt_len(rng))
        shared = (rng.randrange(settings.num_prefixes), settings.prefix_len)
        pieces = (shared, own) if settings.prefix_len else (own,)
        requests.append(SimRequest(now, pieces, output_len(rng)))
    return requests


def read_workload(path: Path) -> list[SimRequest]:
    """Requests from a JSONL file, in order of arrival. Raises ConfigError naming the line.

    A line has `arrival` (s), `prompt_len`, `output_len` and, if need be, `priority`, `user`,
    `prefix` (a name) with `prefix_len`, or `hash_ids` with `block_size`. Lines of a trace that
    `serve --trace-file` wrote are such lines (those of another `type`, and requests that ended
    before their first token, are passed over), and so are those of Mooncake's traces (`timestamp`
    in ms, `input_length`, `output_length`).
    """
    requests = []
    for number, line in read_lines(path):
        if line.get("type", "request") == "request" and line.get("output_len") != 0:
            try:
                requests.append(_request(line, number))
            except (KeyError, TypeError, ValueError) as error:
                what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"{path}, line {number}: {what}.") from error
    if not requests:
        raise ConfigError(f"{path}: there is no request in it.")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return [_shifted(request, -start) for request in requests]


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The JSON objects of a JSONL file with their line numbers. Raises ConfigError."""
    found = []
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from error
    # JSON lines end with \n only; other ends of lines, such as U+2028, may stand in a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: is not valid JSON ({error}).") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: is no JSON object.")
        found.append((number, value))
    return found


def _request(line: Mapping[str, Any], number: int) -> SimRequest:
    arrival = line["timestamp"] / 1000 if "timestamp" in line else line["arrival"]
    prompt_len = int(line["input_length"] if "input_length" in line else line["prompt_len"])
    output_len = int(line["output_length"] if "output_length" in line else line["output_len"])
    if prompt_len < 1 or output_len < 1:
        raise ValueError("prompt and output must have at least one token")
    return SimRequest(
        arrival_s=float(arrival),
        pieces=_pieces(line, prompt_len, number),
        output_len=output_len,
        priority=int(line.get("priority", 0)),
        user=line.get("user"),
    )


def _pieces(line: Mapping[str, Any], prompt_len: int, number: int) -> tuple[Piece, ...]:
    """Shared blocks or a shared prefix first, then what is the request's own."""
    own_key = _key(f"line {number}")
    if hash_ids := line.get("hash_ids"):
        size = int(line.get("block_size", MOONCAKE_BLOCK))
        shared = [(int(hash_id), size) for hash_id in hash_ids[: prompt_len // size]]
    elif "prefix" in line:
        shared = [(_key(f"prefix {line['prefix']}"), min(int(line["prefix_len"]), prompt_len))]
    else:
        shared = []
    left = prompt_len - sum(length for _, length in shared)
    return (*shared, (own_key, left)) if left else tuple(shared)


def _key(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % (2**61 - 1)


def _shifted(request: SimRequest, seconds: float) -> SimRequest:
    return SimRequest(
        request.arrival_s + seconds,
        request.pieces,
        request.output_len,
        request.priority,
        request.user,
    )
