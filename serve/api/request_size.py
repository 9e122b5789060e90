"""What a request amounts to, over all its choices: refused where it is more than the server holds.

Single fields are bounded by the protocol; here are the products of several of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve.config import ServerConfig
from serve.errors import InvalidRequest
from serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.api.generation import Job

MAX_LISTED_TOKENS = 2**21


def check_size(job: Job, config: ServerConfig, max_model_len: int) -> None:
    """Raises InvalidRequest for a request whose choices together hold too much."""
    _check_listed(job)
    _check_entries(job, max_model_len, max(config.max_answer_entries, max_model_len))


def _check_listed(job: Job) -> None:
    """The engine keeps a choice's own copy of its token lists."""
    sizes = _listed(job.sampling)
    if sum(sizes.values()) * job.num_choices > MAX_LISTED_TOKENS:
        name = max(sizes, key=lambda name: sizes[name])
        raise InvalidRequest(
            f"{name} lists {sizes[name]} tokens for each of {job.num_choices} choices; all lists "
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


def _check_entries(job: Job, max_model_len: int, limit: int) -> None:
    """An entry is a token of a prompt or of an answer that is gathered, or one of the candidates
    that are to be told with it; each choice has its own."""
    sampling, n = job.sampling, job.n
    generated = 0
    if job.gathers:
        most = [max(0, max_model_len - len(ids)) for ids in job.prompts]
        if sampling.max_tokens is not None:
            most = [min(room, sampling.max_tokens) for room in most]
        generated = sum(most) * n * ((sampling.logprobs or 0) + 1)
    read = sum(map(len, job.prompts)) * n * ((sampling.prompt_logprobs or 0) + 1)
    if generated + read <= limit:
        return
    raise InvalidRequest(
        f"The request could come to {generated + read} entries: choices × (prompt tokens × "
        f"(prompt_logprobs + 1) + max_tokens × (logprobs + 1)). This server holds {limit} "
        "(--max-answer-entries). Lower n, max_tokens or the number of logprobs, or stream.",
        param=_largest_factor(job, generated > read),
    )


def _largest_factor(job: Job, generates: bool) -> str:
    sampling = job.sampling
    factors = {"n": job.n, job.prompt_field: len(job.prompts)}
    if generates:
        name = "logprobs" if job.continues_prompt else "top_logprobs"
        factors[name] = sampling.logprobs or 0
    else:
        factors["prompt_logprobs"] = sampling.prompt_logprobs or 0
    largest = max(factors, key=lambda name: factors[name])
    return largest if factors[largest] > 1 else "max_tokens"
