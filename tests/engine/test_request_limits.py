"""What is refused before the engine sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.engine.request_limits import resolve_sampling
from serve.engine.served_model import ServedModel
from serve.errors import InvalidRequest, PromptTooLong
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import READY

MODEL = ServedModel(("m",), READY.max_model_len, READY.vocab_size, frozenset({2, 5}), {})


def resolve(num_prompt_tokens: int, pool_blocks: int = 16, **sampling: object) -> SamplingParams:
    """Blocks of 16; the context is 200 tokens."""
    ready = replace(READY, num_blocks=pool_blocks)
    return resolve_sampling([1] * num_prompt_tokens, SamplingParams(**sampling), MODEL, ready)


def test_val_04_a_missing_max_tokens_becomes_the_room_there_is() -> None:
    assert resolve(150, max_tokens=None).max_tokens == 50
    assert resolve(150, max_tokens=7).max_tokens == 7


def test_the_last_token_needs_no_kv_so_the_pool_has_room_for_one_more() -> None:
    assert resolve(40, pool_blocks=4, max_tokens=None).max_tokens == 25


@pytest.mark.parametrize(("prompt", "max_tokens"), [(200, 1), (200, None), (201, 0), (500, 16)])
def test_a_prompt_beyond_the_context_is_refused_with_the_limit(
    prompt: int, max_tokens: int | None
) -> None:
    with pytest.raises(PromptTooLong, match=f"{prompt} tokens.*200") as error:
        resolve(prompt, max_tokens=max_tokens)
    assert error.value.param == "prompt"


def test_a_prompts_length_is_judged_before_its_ids() -> None:
    with pytest.raises(PromptTooLong):
        resolve_sampling([10**6] * 500, SamplingParams(), MODEL, READY)


def test_a_prompt_that_fills_the_context_can_still_be_scored() -> None:
    assert resolve(200, max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize(("prompt", "blocks"), [(300, 13), (13 * 16 + 1, 13), (65, 4)])
def test_val_02_a_prompt_beyond_the_pool_is_refused_with_the_capacity(
    prompt: int, blocks: int
) -> None:
    with pytest.raises(PromptTooLong, match=r"200|13 blocks holds 208|4 blocks holds 64"):
        resolve(prompt, pool_blocks=blocks, max_tokens=1)


def test_val_03_a_completion_that_would_outgrow_the_pool_is_refused() -> None:
    with pytest.raises(PromptTooLong, match=r"4 blocks holds 64.*at most 25") as error:
        resolve(40, pool_blocks=4, max_tokens=100, ignore_eos=True)
    assert error.value.param == "max_tokens"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        resolve(0)


@pytest.mark.parametrize("bad_id", [-1, 262, 10**12])
@pytest.mark.parametrize(
    ("field", "wrap"),
    [
        ("stop_token_ids", lambda i: (0, i)),
        ("logit_bias", lambda i: {i: 1.0}),
        ("allowed_token_ids", lambda i: (i,)),
        ("bad_words_token_ids", lambda i: ((0,), (1, i))),
    ],
)
def test_smp_08_ids_outside_the_vocabulary_are_refused_by_field(
    field: str, wrap: object, bad_id: int
) -> None:
    assert callable(wrap)
    with pytest.raises(InvalidRequest, match=f"{bad_id}.*vocabulary") as error:
        resolve(3, **{field: wrap(bad_id)})
    assert error.value.param == field.removesuffix("_token_ids") or error.value.param == field


def test_prompt_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt holds token id 262"):
        resolve_sampling([0, 262], SamplingParams(), MODEL, READY)


def test_end_ids_join_the_stop_ids_once() -> None:
    assert resolve(3, stop_token_ids=(5, 7)).stop_token_ids == (5, 7, 2)
    assert resolve(3, stop_token_ids=(5, 7), ignore_eos=True).stop_token_ids == (5, 7)


def test_min_tokens_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        resolve(190, max_tokens=None, min_tokens=11)
