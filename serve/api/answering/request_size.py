"""What a request amounts to, over all its choices: refused where it is more than the server holds.

Single fields are bounded by the protocol; here are the products of several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.config import ServerConfig
from serve.errors import InvalidRequest
from serve.sampling_params import SamplingParams

MAX_LISTED_TOKENS = 2**21


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What counts of a request: `n` choices for each of its prompts."""

    prompt_lens: Sequence[int]
    sampling: SamplingParams
    n: int
    gathers: bool  # the answer is put together before it is sent
    prompt_field: str  # what the API calls the prompt

    @property
    def num_choices(self) -> int:
        """How many completions there will be."""
        return len(self.prompt_lens) * self.n


def check_size(size: RequestSize, config: ServerConfig, max_model_len: int) -> None:
    """Raises InvalidRequest for a request whose choices together hold too much."""
    _check_listed(size)
    _check_entries(size, max_model_len, max(config.max_answer_entries, max_model_len))


def _check_listed(size: RequestSize) -> None:
    """The engine keeps a choice's own copy of its token lists."""
    sizes = _listed(size.sampling)
    if sum(sizes.values()) * size.num_choices > MAX_LISTED_TOKENS:
        name = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequest(
            f"{name} lists {sizes[name]} tokens for each of {size.num_choices} choices; all lists "
            f"of all choices may have {MAX_LISTED_TOKENS}. Shorten the list or lower n.",
            param=name,
        )


def _listed(sampling: SamplingParams) -> dict[str, int]:
    words = sampling.bad_words_token_ids
    return {
        "allowed_token_ids": len(sampling.allowed_token_ids),
        "logit_bias": len(sampling.logit_bias),
        "stop_token_ids": len(sampling.stop_token_ids),
        "bad_words": len(words) * max(map(len, words), default=0),
    }


def _check_entries(size: RequestSize, max_model_len: int, limit: int) -> None:
    """An entry is a token of a prompt or of an answer that is gathered, or one of the candidates
    that are to be told with it; each choice has its own."""
    sampling, n = size.sampling, size.n
    generated = 0
    if size.gathers:
        most = [max(0, max_model_len - length) for length in size.prompt_lens]
        if sampling.max_tokens is not None:
            most = [min(room, sampling.max_tokens) for room in most]
        generated = sum(most) * n * ((sampling.logprobs or 0) + 1)
    read = sum(size.prompt_lens) * n * ((sampling.prompt_logprobs or 0) + 1)
    if generated + read <= limit:
        return
    raise InvalidRequest(
        f"The request could come to {generated + read} entries: choices × (prompt tokens × "
        f"(prompt_logprobs + 1) + max_tokens × (logprobs + 1)). This server holds {limit} "
        "(--max-answer-entries). Lower n, max_tokens or the number of logprobs, or stream.",
        param=_largest_factor(size, generated > read),
    )


def _largest_factor(size: RequestSize, generates: bool) -> str:
    sampling = size.sampling
    factors = {"n": size.n, size.prompt_field: len(size.prompt_lens)}
    if generates:
        name = "logprobs" if size.prompt_field == "prompt" else "top_logprobs"
        factors[name] = sampling.logprobs or 0
    else:
        factors["prompt_logprobs"] = sampling.prompt_logprobs or 0
    largest = max(factors, key=lambda name: factors[name])
    return largest if factors[largest] > 1 else "max_tokens"
