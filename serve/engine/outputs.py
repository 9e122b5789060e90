"""What the front yields for a request: text, ids and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from serve.messages import FinishReason, RequestTimes, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One increment of a request's output. The last one has `finish_reason`.

    `text` is final: whole characters only, nothing that a stop string could still take back.
    `token_ids` and `logprobs` may run ahead of `text` (a character or stop string is pending).
    `stop_reason` is the stop string or client-given stop token id that ended it (None for EOS).
    `hides_last`: the last token ended the text and is not part of it.
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
