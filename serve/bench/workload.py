"""What a run asks for: prompts with lengths, and when each is due."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from serve.bench.options import ArrivalOptions, Lengths, WorkloadOptions
from serve.errors import ConfigError

MIN_TOKEN_ID = 1000
"""Below lie special tokens and bytes in most vocabularies."""

WORDS = (
    "the of and to in is was for on that with as it be by are at from his an were which this has "
    "had their its have but not they been one he more two first may there when time most also into "
    "other some only can new these about all would such him she her over if between after then who "
    "than out up many before during under used world city year people state university water house "
    "river school music party family church power history group number line part land left high "
    "small large long early great"
)
"""Words that are one token each, with the space before them, in the usual vocabularies."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a run. `arrival_s`: seconds after the begin, where a trace says so."""

    prompt: Prompt
    output_len: int
    arrival_s: float | None = None


def plan_requests(options: WorkloadOptions, chat: bool) -> list[PlannedRequest]:
    """The requests of a run; the same for the same options. Raises ConfigError."""
    rng = Random(options.seed)
    if options.dataset_path is not None:
        return list(islice(_read_jsonl(options, chat, rng), options.num_prompts))
    make_prompt = prompt_maker(options.prompt_format, options.max_token_id, chat)
    lengths = Lengths.parse(options.input_len, "input-len")
    long_lengths = Lengths.parse(options.long_input_len, "long-input-len")
    output_lens = Lengths.parse(options.output_len, "output-len")
    tokens = _TokenSource(rng, options.max_token_id)
    prefixes = [tokens.take(options.prefix_len) for _ in range(options.num_prefixes)]
    planned = []
    for _ in range(options.num_prompts):
        is_long = options.dataset == "mixed" and rng.random() < options.long_share
        token_ids = tokens.take((long_lengths if is_long else lengths).draw(rng))
        if options.dataset == "shared-prefix":
            token_ids = rng.choice(prefixes) + token_ids
        planned.append(PlannedRequest(make_prompt(token_ids), output_lens.draw(rng)))
    return planned


def random_token_ids(rng: Random, count: int, max_token_id: int) -> list[int]:
    """Ids drawn uniformly from MIN_TOKEN_ID up to `max_token_id`."""
    return _TokenSource(rng, max_token_id).take(count)


def prompt_maker(
    prompt_format: Literal["auto", "ids", "words"], max_token_id: int, chat: bool
) -> Callable[[list[int]], Prompt]:
    """How random ids become a prompt. Raises ConfigError for ids in a chat."""
    if prompt_format == "ids" and chat:
        raise ConfigError("--prompt-format ids: chat messages are text; use words.")
    if prompt_format == "ids" or (prompt_format == "auto" and not chat):
        return lambda token_ids: token_ids
    words = WORDS.split()

    def text(token_ids: list[int]) -> str:
        return " ".join(words[token_id % len(words)] for token_id in token_ids)

    if chat:
        return lambda token_ids: [{"role": "user", "content": text(token_ids)}]
    return text


def arrival_times(
    requests: Sequence[PlannedRequest], options: ArrivalOptions, seed: int
) -> list[float]:
    """When each request is due, in seconds after the begin. Raises ConfigError."""
    if options.arrivals == "trace":
        recorded = [request.arrival_s for request in requests if request.arrival_s is not None]
        if len(recorded) < len(requests):
            raise ConfigError("--arrivals trace: every line of --dataset-path needs an arrival_s.")
        return recorded
    if math.isinf(options.request_rate):
        return [0.0] * len(requests)
    if options.arrivals == "fixed":
        return [index / options.request_rate for index in range(len(requests))]
    rng = Random(seed + 1)  # not the prompts' generator: another rate must not change the prompts
    gaps = [rng.expovariate(options.request_rate) for _ in range(len(requests) - 1)]
    return [0.0, *accumulate(gaps)]


class _TokenSource:
    def __init__(self, rng: Random, max_token_id: int) -> None:
        self._rng = rng
        self._range = range(MIN_TOKEN_ID, max_token_id)

    def take(self, count: int) -> list[int]:
        return self._rng.choices(self._range, k=count)


def _read_jsonl(options: WorkloadOptions, chat: bool, rng: Random) -> Iterable[PlannedRequest]:
    path = options.dataset_path
    assert path is not None
    output_lens = Lengths.parse(options.output_len, "output-len")
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: cannot be read ({error}).") from error
    # JSON lines end with \n only; other ends of lines, such as U+2028, may stand in a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            entry = _json_object(line, path, number)
            arrival = entry.get("arrival_s")
            yield PlannedRequest(
                _prompt_of(entry, chat, f"--dataset-path {path}, line {number}"),
                int(entry.get("output_len") or output_lens.draw(rng)),
                None if arrival is None else float(arrival),
            )


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise ConfigError(f"--dataset-path {path}, line {number}: is not a JSON object.")
    return entry


def _prompt_of(entry: Mapping[str, Any], chat: bool, where: str) -> Prompt:
    prompt, messages = entry.get("prompt"), entry.get("messages")
    if chat and isinstance(messages, list):
        return messages
    if chat and isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not chat and isinstance(prompt, str | list):
        return prompt
    wanted = "messages, or a prompt that is text" if chat else "a prompt (text or token ids)"
    raise ConfigError(f"{where}: has no {wanted}.")
