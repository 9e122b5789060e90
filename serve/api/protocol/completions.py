"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from serve.api.protocol.bounds import MAX_PROMPTS, MAX_TOKEN_IDS
from serve.api.protocol.common import (
    FinishedBy,
    GenerationRequest,
    PromptLogprobs,
    RequestMetrics,
    ResponseModel,
    Usage,
    Whole,
)

Prompt = str | list[int]


def _read_prompts(value: Any) -> list[Prompt]:
    """The four shapes of `prompt` as a list of texts and id lists; says which item is wrong."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of texts, token ids, or a list of token-id lists")
    if _is_ids(value):
        _check_count(value, "the list")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"takes at most {MAX_PROMPTS} prompts, not {len(value)}")
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and item and _is_ids(item)):
            raise ValueError(f"item {index} must be a text or a list of token ids (0 or more)")
        if not isinstance(item, str):
            _check_count(item, f"item {index}")
    return value


def _check_count(ids: list[int], which: str) -> None:
    if len(ids) > MAX_TOKEN_IDS:
        raise ValueError(f"{which} has {len(ids)} token ids; {MAX_TOKEN_IDS} are the most")


def _is_ids(value: list[Any]) -> bool:
    # A million ids take 20 ms like this, and 100 ms in a loop.
    return set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_TOKEN_IDS,
    "items": _ID_SCHEMA,
}
_LIST_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT_SCHEMA = {
    "title": "Prompt",
    "anyOf": [
        {"type": "string"},
        {**_LIST_SCHEMA, "items": {"type": "string"}},
        _IDS_SCHEMA,
        {**_LIST_SCHEMA, "items": _IDS_SCHEMA},
    ],
}
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_read_prompts),
    WithJsonSchema({"title": "Prompt", **_PROMPT_SCHEMA}),
]


class CompletionRequest(GenerationRequest):
    """What to complete, and how."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Whole | None = None


class CompletionLogprobs(ResponseModel):
    """Four lists with one entry per token; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One completion of one prompt; `index` runs over prompts, then over their `n`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseModel):
    """The answer without streaming."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics | None = None
