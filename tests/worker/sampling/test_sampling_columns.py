from __future__ import annotations

import pytest

from serve.sampling_params import SamplingParams
from serve.worker.sampling.sampling_columns import TOP_K, TOP_P, SamplingColumns, Wish

VOCAB = 100


def admitted(sampling: SamplingParams) -> SamplingColumns:
    columns = SamplingColumns(4, VOCAB)
    columns.admit(2, sampling, num_prompt_tokens=5)
    return columns


@pytest.mark.parametrize(
    ("sampling", "wishes"),
    [
        (SamplingParams(temperature=0.0), Wish(0)),
        (SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=3), Wish(0)),
        (SamplingParams(seed=1), Wish.RANDOM),
        (SamplingParams(seed=1, top_k=VOCAB), Wish.RANDOM),
        (SamplingParams(seed=1, top_k=VOCAB - 1), Wish.RANDOM | Wish.TOP),
        (SamplingParams(seed=1, top_p=0.99), Wish.RANDOM | Wish.TOP),
        (SamplingParams(seed=1, min_p=0.01), Wish.RANDOM | Wish.MIN_P),
        (SamplingParams(temperature=0.0, frequency_penalty=-0.1), Wish.PENALTIES),
        (SamplingParams(temperature=0.0, logit_bias={1: 1.0}), Wish.BIAS),
        (SamplingParams(temperature=0.0, allowed_token_ids=(1,)), Wish.ALLOWED),
        (SamplingParams(temperature=0.0, bad_words_token_ids=((1,),)), Wish.BAD_WORDS),
        (SamplingParams(temperature=0.0, min_tokens=2), Wish(0)),  # nothing could end it early
        (SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1,)), Wish.MIN_TOKENS),
        (SamplingParams(temperature=0.0, logprobs=0), Wish.LOGPROBS),
    ],
)
def test_a_row_wishes_for_exactly_what_changes_its_answer(
    sampling: SamplingParams, wishes: Wish
) -> None:
    columns = admitted(sampling)
    assert columns.wishes[2] == wishes
    assert not columns.wishes[[0, 1, 3]].any()


def test_filters_that_are_off_can_cut_nothing() -> None:
    numbers = admitted(SamplingParams(seed=1, top_k=-1, top_p=1.0)).numbers[2]
    assert numbers[TOP_K] == VOCAB
    assert numbers[TOP_P] > 1.0


def test_a_row_draws_with_its_requests_seed_and_never_without_one() -> None:
    assert admitted(SamplingParams(seed=-(2**63))).seeds[2] == -(2**63)
    assert admitted(SamplingParams(temperature=0.0)).seeds[2] == 0
    with pytest.raises(AssertionError, match="needs a seed"):
        admitted(SamplingParams(temperature=0.5))
