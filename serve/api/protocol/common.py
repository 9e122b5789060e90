"""What chat and completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.api.protocol.bounds import (
    MAX_ALLOWED_TOKENS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_TOKENS,
    BadWords,
    FormChoices,
    GrammarText,
    JsonObject,
    Listed,
    ModelName,
    Name,
    StopString,
    StopStrings,
)


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is an integer there, and some clients write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), BeforeValidator(_whole)]
"""An integer of at most 64 bits; never a boolean, never text."""
NumChoices = Annotated[int, Field(ge=-(2**63), le=MAX_CHOICES), BeforeValidator(_whole)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(BaseModel):
    """Base of what clients send: no coercion; fields we do not know are kept, not refused."""

    model_config = ConfigDict(strict=True, extra="allow")


class ResponseModel(BaseModel):
    """Base of what we send."""

    model_config = ConfigDict(extra="forbid")


FinishedBy = Literal["stop", "length", "repetition", "tool_calls"]
"""`finish_reason`; "repetition" only for those who ask for repetition_detection."""


class StreamOptions(RequestModel):
    """Which usage figures a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionWish(RequestModel):
    """When an output counts as repeating itself; see `RepetitionDetection`."""

    max_pattern_size: Whole
    min_pattern_size: Whole | None = None
    min_count: Whole


class StructuredOutputs(RequestModel):
    """vLLM's: exactly one form, and how a JSON document is laid out. A schema may be its text."""

    json_: JsonObject | GrammarText | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: FormChoices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: JsonObject | GrammarText | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Name | None = None
    disable_additional_properties: bool | None = None


class GenerationRequest(RequestModel):
    """The fields of both endpoints. Names and meaning are OpenAI's, the others vLLM's."""

    model: ModelName | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Whole | None = None
    n: NumChoices | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    top_k: Whole | None = None
    min_p: Finite | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    repetition_penalty: Finite | None = None
    seed: Whole | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[Listed[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, Finite], Field(max_length=MAX_BIASES)] | None = None
    allowed_token_ids: Annotated[Listed[TokenId], Field(max_length=MAX_ALLOWED_TOKENS)] | None = (
        None
    )
    bad_words: BadWords | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None
    return_prompt_text: bool | None = None
    repetition_detection: RepetitionWish | None = None
    speculative: bool | None = None
    priority: Whole | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: Name | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = None
    user: Name | None = None
    # the form of the answer; at most one of these
    response_format: Any = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: FormChoices | None = None
    guided_grammar: GrammarText | None = None
    grammar: GrammarText | None = None
    json_schema: JsonObject | GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None


class PromptTokensDetails(ResponseModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(ResponseModel):
    """Token counts of one HTTP request: each prompt once, all its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RequestMetrics(ResponseModel):
    """How long an HTTP request took, all its choices together; null for what never happened."""

    queue_time_ms: float | None  # from arrival to the first step
    time_to_first_token_ms: float | None  # from arrival
    generation_time_ms: float | None  # from the first token to the last
    mean_itl_ms: float | None  # mean time between a choice's tokens
    tokens_per_second: float | None  # generated tokens over the time from the first step to the end
    num_preemptions: int


class PromptLogprob(ResponseModel):
    """One candidate at a prompt position (vLLM's shape)."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""One entry per prompt token, the first is null."""


class ErrorInfo(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    """Every answer with a status of 400 or more."""

    error: ErrorInfo
