"""What is checked of a request before the engine sees it, how its sampling is resolved, and what
it is then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

from serve.engine.served_model import ServedModel
from serve.errors import InvalidRequest, PromptTooLong
from serve.messages import EngineReady
from serve.sampling_params import Grammar, SamplingParams
from serve.text.detokenizer import TextPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all choices of one prompt share. `end_of_text_ids` are the ids whose stop the client did
    not ask for by number."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    end_of_text_ids: frozenset[int]
    text: TextPlan

    def for_engine(self, seed: int | None) -> SamplingParams:
        """The sampling as the engine is told, which knows no text: without stop strings. `seed`
        None: its own."""
        sampling = self.sampling
        if seed is None and not sampling.stop:
            return sampling
        own = sampling.seed if seed is None else seed
        return replace(sampling, stop=(), seed=own)


def resolve_sampling(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    model: ServedModel,
    ready: EngineReady,
) -> SamplingParams:
    """`sampling` with `max_tokens` set and the model's end ids among `stop_token_ids`.

    Raises PromptTooLong or InvalidRequest, naming the limit, for what can never be answered.
    """
    if not prompt_token_ids:
        raise InvalidRequest("The prompt is empty: it has no tokens.", param="prompt")
    max_tokens = _max_tokens(len(prompt_token_ids), sampling.max_tokens, ready)
    _check_ids("prompt", prompt_token_ids, model.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, model.vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, model.vocab_size)
    for word in sampling.bad_words_token_ids:
        _check_ids("bad_words", word, model.vocab_size)
    end_ids = () if sampling.ignore_eos else tuple(sorted(model.eos_token_ids))
    stop_ids = tuple(dict.fromkeys(sampling.stop_token_ids + end_ids))
    grammar = _with_ends(sampling.grammar, model)
    return replace(sampling, max_tokens=max_tokens, stop_token_ids=stop_ids, grammar=grammar)


def _with_ends(grammar: Grammar | None, model: ServedModel) -> Grammar | None:
    """A grammar that knows how the model ends a text."""
    if grammar is None:
        return None
    if not model.eos_token_ids:
        raise InvalidRequest(
            "This model's files name no end-of-text token, so no answer can be held to a form."
        )
    return replace(grammar, end_token_ids=tuple(sorted(model.eos_token_ids)))


def with_seed(sampling: SamplingParams, seeds: Random) -> SamplingParams:
    """`sampling` with a seed, if it draws at all. It is drawn once, in front: a request that is
    computed again, after preemption or in another engine, then draws the same tokens."""
    if sampling.seed is not None or sampling.greedy:
        return sampling
    return replace(sampling, seed=seeds.getrandbits(63))


def check_priority(priority: int, ready: EngineReady) -> None:
    """Raises InvalidRequest for a priority that would have no effect."""
    if priority != 0 and ready.scheduling_policy != "priority":
        raise InvalidRequest(
            f"priority {priority} would have no effect, because the scheduling policy is "
            f"{ready.scheduling_policy} (--scheduling-policy priority would heed it). Leave it out "
            "or send 0.",
            param="priority",
        )


def most_tokens(ready: EngineReady) -> int:
    """How many tokens prompt and answer may have together: what the context and the KV pool both
    leave. The last token that a request may produce needs no KV."""
    return min(ready.max_model_len, ready.num_blocks * ready.block_size + 1)


def _max_tokens(num_prompt_tokens: int, wanted: int | None, ready: EngineReady) -> int:
    """The room that is left beside the prompt, if it is enough for what is wanted."""
    pool = ready.num_blocks * ready.block_size
    limit = most_tokens(ready)
    of_what = (
        f"the KV pool of {ready.num_blocks} blocks holds {pool}"
        if limit < ready.max_model_len
        else f"this model accepts {limit}"
    )
    remedy = (
        "give the server a larger KV pool (--kv-cache-memory-bytes)"
        if pool < ready.max_model_len + ready.block_size  # more context would not fit into it
        else "raise --max-model-len"
    )
    room = limit - num_prompt_tokens
    if room < 0 or (room == 0 and wanted != 0):
        raise PromptTooLong(
            f"The prompt has {num_prompt_tokens} tokens, but {of_what}, completion included. "
            f"Shorten the prompt or {remedy}.",
            param="prompt",
        )
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}, together "
            f"{num_prompt_tokens + wanted}, but {of_what}. Ask for at most {room} tokens.",
            param="max_tokens",
        )
    return room if wanted is None else wanted


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(
        f"{name} holds token id {wrong}, which is not within the vocabulary "
        f"(0 … {vocab_size - 1}).",
        param=name,
    )
