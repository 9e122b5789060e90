"""What the front yields for a request: text, ids and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from serve.messages import FinishReason, RequestTimes, TokenLogprobs

T = TypeVar("T")


class RequestOutput(NamedTuple):
    """One increment of a request's output. The last one has `finish_reason`.

    `text` is final: whole characters only, nothing that a stop string could still take back.
    `token_ids` and `logprobs` may run ahead of `text` (a character or stop string is pending).
    `stop_reason` is the stop string or client-given stop token id that ended it (None for EOS).
    `hides_last`: the last token ended the text and is not part of it.

    A named tuple: there is one per token, and a frozen dataclass costs five times as much to make.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    hides_last: bool = False
    error: str | None = None
    retry_after_s: float | None = None  # with an error: too much waits; come back then
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0  # so far
    times: RequestTimes | None = None  # with finish_reason
    is_invalid: bool = False  # with an error: the request itself is at fault


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Successive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    return outputs[-1]._replace(
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=_listed(output.logprobs for output in outputs),
        prompt_logprobs=_listed(output.prompt_logprobs for output in outputs),
    )


def _listed(parts: Iterable[list[T] | None]) -> list[T] | None:
    return [item for part in parts if part for item in part] or None
