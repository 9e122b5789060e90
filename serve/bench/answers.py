"""What an answer's bytes say: when its tokens came, and how many there were."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.bench.client import RawAnswer

_SHOWN = 200  # characters of an error's text


class BadAnswer(Exception):
    """The server answered with an error, or not to the end."""


@dataclass(slots=True)
class Answer:
    """Arrival times of the events that carry tokens, and exact counts where the server gives them.

    `counted_by`: "usage" (the server's own count), "ids" (token ids in the stream) or "events"
    (one token assumed for each; the figures then say so).
    """

    token_times: list[float] = field(default_factory=list)  # time.perf_counter()
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    counted_by: str = "events"


def read_answer(raw: RawAnswer) -> Answer:
    """Raises BadAnswer."""
    if raw.status != 200:
        raise BadAnswer(f"HTTP {raw.status}: {_error_text(raw.body)}")
    if not raw.content_type.startswith("text/event-stream"):
        return _read_whole(raw)
    answer = Answer()
    num_ids = 0
    ended = False
    for when, data in events(raw.pieces):
        if data == b"[DONE]":
            ended = True
            continue
        event = _parse(data)
        _take_usage(event, answer)
        for choice in event.get("choices") or ():
            ended = ended or choice.get("finish_reason") is not None
            num_ids += len(choice.get("token_ids") or ())
            if _carries_tokens(choice):
                answer.token_times.append(when)
    if not ended:
        raise BadAnswer("the stream ended early")
    if answer.counted_by == "events":
        answer.num_tokens = num_ids or len(answer.token_times)
        answer.counted_by = "ids" if num_ids else "events"
    if not answer.token_times:
        raise BadAnswer("the stream holds no tokens")
    return answer


def events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its last byte came."""
    rest = b""
    for when, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:  # every server of the field writes an event's data on one line
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


def _read_whole(raw: RawAnswer) -> Answer:
    """An answer that is one JSON object: all its tokens came with its last byte."""
    body = _parse(raw.body)
    answer = Answer()
    _take_usage(body, answer)
    if not body.get("choices") or answer.counted_by != "usage":
        raise BadAnswer("the answer has no choices, or no usage")
    answer.token_times = [raw.pieces[-1][0]]
    return answer


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise BadAnswer(f"not JSON: {data[:_SHOWN]!r}") from error
    if not isinstance(event, dict) or "error" in event:
        raise BadAnswer(_error_text(data))
    return event


def _take_usage(event: Mapping[str, Any], answer: Answer) -> None:
    """Later counts replace earlier ones: some servers repeat a running count in every event."""
    if usage := event.get("usage"):
        answer.num_tokens = usage.get("completion_tokens") or 0
        answer.num_prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        answer.num_cached_tokens = details.get("cached_tokens")
        answer.counted_by = "usage"


def _carries_tokens(choice: Mapping[str, Any]) -> bool:
    """A chat's first event only names the role, and a last one may only say why it ended."""
    delta = choice.get("delta")
    if delta is not None:
        kinds = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
        return any(delta.get(kind) for kind in kinds)
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def _error_text(body: bytes) -> str:
    text = body[:2000].decode("utf-8", "replace")
    try:
        error = json.loads(body).get("error", text)
    except (ValueError, AttributeError):
        error = text
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_SHOWN]
