"""Request fields → sampling parameters and prompt ids. Every default lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.api.answering.endpoint import Call
from serve.api.answering.forms import asked_form
from serve.api.answering.generation import Job
from serve.api.answering.logprobs import TokenNames
from serve.api.answering.unsupported import refuse_unsupported_fields
from serve.api.protocol.bounds import MAX_PROMPTS
from serve.api.protocol.common import GenerationRequest, RepetitionWish
from serve.engine.async_engine import AsyncEngine
from serve.errors import InvalidRequest
from serve.sampling_params import RepetitionDetection, SamplingParams
from serve.text.tokenizer import Tokenizer

MAX_SALT_CHARS = 128
_NOT_IN_A_SALT = frozenset("@/\\\0")
MAX_BAD_WORD_TOKENS = 64

# Fields that SamplingParams has under the same name.
_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "speculative",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class Limit(NamedTuple):
    """The most tokens of an answer: under what name it is asked for, how many (None: as many as the
    context takes), and what is the least that may be asked for."""

    field: str
    value: int | None
    least: int


class LogprobWish(NamedTuple):
    """How many alternatives are wanted per generated token, under what name; None: no
    log-probabilities. `of_prompt`: the prompt's tokens are scored as well."""

    field: str
    value: int | None
    of_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request asks for beside its prompts, checked and with every default filled in."""

    sampling: SamplingParams
    names: TokenNames
    n: int
    num_top: int | None  # alternatives per generated token; None: no log-probabilities
    limit_field: str
    streams: bool
    priority: int
    timeout_s: float | None
    cache_salt: str | None
    relaxed: tuple[str, ...]  # of the schema's keywords, what is not held to

    def job(self, call: Call, prompts: list[list[int]], prompt_field: str = "prompt") -> Job:
        """What to generate for these prompts."""
        return Job(
            label=call.envelope.id,
            prompts=prompts,
            sampling=self.sampling,
            n=self.n,
            gathers=not self.streams,
            priority=self.priority,
            timeout_s=self.timeout_s,
            client=call.client,
            cache_salt=self.cache_salt,
            relaxed=self.relaxed,
            prompt_field=prompt_field,
            limit_field=self.limit_field,
        )


async def wishes(
    body: GenerationRequest, call: Call, limit: Limit, logprobs: LogprobWish, num_prompts: int = 1
) -> Wishes:
    """Read all that a body asks for. Raises InvalidRequest, naming the field; ids are checked
    against the vocabulary by the engine."""
    _refuse_unsupported(body)
    n = _num_choices(body, num_prompts)
    cap, tokenizer = call.service.config.max_logprobs, call.engine.tokenizer
    num_top = capped_logprobs(logprobs.value, cap, logprobs.field)
    scored = [capped_logprobs(body.prompt_logprobs, cap, "prompt_logprobs")]
    if logprobs.of_prompt:
        scored.append(num_top)
    if limit.value is not None and limit.value < limit.least:
        raise InvalidRequest(
            f"{limit.field} must be {limit.least} or more, not {limit.value}.", param=limit.field
        )
    form = await asked_form(body, call.service.config)
    sampling = await _sampling_params(
        body,
        call.engine,
        max_tokens=limit.value,
        grammar=form.grammar if form is not None else None,
        logprobs=num_top,
        prompt_logprobs=max((each for each in scored if each is not None), default=None),
    )
    as_ids = bool(body.return_tokens_as_token_ids)
    return Wishes(
        sampling=sampling,
        names=TokenNames(tokenizer, as_ids, sampling.skip_special_tokens),
        n=n,
        num_top=num_top,
        limit_field=limit.field,
        streams=bool(body.stream),
        priority=body.priority or 0,
        timeout_s=body.timeout or call.timeout_s,
        cache_salt=cache_salt(body.cache_salt),
        relaxed=form.relaxed if form is not None else (),
    )


def _refuse_unsupported(body: GenerationRequest) -> None:
    """Raises Unsupported, naming the field and the reason."""
    if body.model_extra:
        refuse_unsupported_fields(body.model_extra, body.n or 1)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if body.stream_interval is not None and body.stream_interval < 1:
        raise InvalidRequest("stream_interval must be 1 or more.", param="stream_interval")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed.", param="prompt_logprobs")


def _num_choices(body: GenerationRequest, num_prompts: int = 1) -> int:
    """`n`, within bounds."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise InvalidRequest(f"n must be 1 or more, not {n}.", param="n")
    if n * num_prompts > MAX_PROMPTS:
        raise InvalidRequest(
            f"The request asks for more than {MAX_PROMPTS} completions ({num_prompts} prompts, "
            f"n = {n}). Split it.",
            param="n" if n > 1 else "prompt",
        )
    return n


async def _sampling_params(
    body: GenerationRequest, engine: AsyncEngine, **more: Any
) -> SamplingParams:
    """What the body asks, over the model's own defaults, over ours; and `more`."""
    defaults = engine.model.generation_defaults
    given = {name: getattr(body, name) for name in _SAME_NAME}
    fields: dict[str, Any] = {
        **{name: value for name, value in defaults.items() if name in _SAME_NAME},
        **{name: value for name, value in given.items() if value is not None},
    }
    return SamplingParams(
        **fields,
        **more,
        seed=None if body.seed == -1 else body.seed,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        allowed_token_ids=_allowed_ids(body.allowed_token_ids),
        logit_bias=_logit_bias(body.logit_bias or {}),
        repetition_detection=_repetition_detection(body.repetition_detection),
        bad_words_token_ids=await _bad_words(body.bad_words or [], engine.tokenizer),
    )


def capped_logprobs(count: int | None, cap: int, param: str) -> int | None:
    """The count, if within 0 and the cap."""
    if count is not None and not 0 <= count <= cap:
        raise InvalidRequest(f"{param} must be between 0 and {cap}, not {count}.", param=param)
    return count


async def prompt_ids(
    prompts: Sequence[str | list[int]], body: GenerationRequest, engine: AsyncEngine
) -> list[list[int]]:
    """Each prompt as ids; texts with the tokenizer's special tokens unless told otherwise.

    Raises PromptTooLong for a text that could not fit, before any time is spent on it.
    """
    adds = True if body.add_special_tokens is None else body.add_special_tokens
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await engine.tokenizer.encode_all(texts, adds) if texts else ())
    return [
        truncated(next(encoded) if isinstance(prompt, str) else prompt, body, engine)
        for prompt in prompts
    ]


def truncated(ids: list[int], body: GenerationRequest, engine: AsyncEngine) -> list[int]:
    """At most `truncate_prompt_tokens` ids; the start is cut off unless `truncation_side` says not.

    -1 means as many as the context takes beside one new token.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return ids
    if limit == -1:
        limit = engine.model.max_model_len - 1
    if limit < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens"
        )
    return ids[:limit] if body.truncation_side == "right" else ids[-limit:]


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))


def _allowed_ids(ids: list[int] | None) -> tuple[int, ...]:
    if ids is not None and not ids:
        raise InvalidRequest(
            "allowed_token_ids must not be empty; leave it out.", param="allowed_token_ids"
        )
    return tuple(dict.fromkeys(ids or ()))


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Keys are ids in text form; values are cut to ±100, which force or ban already."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(
                f"logit_bias: {key[:20]!r} is not a token id in text form.", param="logit_bias"
            )
    return {int(key): max(-100.0, min(100.0, value)) for key, value in bias.items()}


async def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's ids, as it is written at the start of a text and after a space."""
    if not words:
        return ()
    if any(not word.strip() for word in words):
        raise InvalidRequest("bad_words must not hold an empty word.", param="bad_words")
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    encoded = await tokenizer.encode_all(spellings, add_special_tokens=False)
    if max(map(len, encoded)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words must not hold a text of more than {MAX_BAD_WORD_TOKENS} tokens.",
            param="bad_words",
        )
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def _repetition_detection(wish: RepetitionWish | None) -> RepetitionDetection | None:
    if wish is None:
        return None
    return RepetitionDetection(
        max_pattern_size=wish.max_pattern_size,
        min_pattern_size=wish.min_pattern_size or 0,
        min_count=wish.min_count,
    )


def cache_salt(salt: str | None) -> str | None:
    """The salt, if it is one (vLLM's rules)."""
    if salt is None or (0 < len(salt) <= MAX_SALT_CHARS and not _NOT_IN_A_SALT & set(salt)):
        return salt
    raise InvalidRequest(
        f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, none of them @, /, \\ or NUL.",
        param="cache_salt",
    )
