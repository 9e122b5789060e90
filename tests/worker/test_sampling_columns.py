from __future__ import annotations

import pytest

from serve.sampling_params import SamplingParams
from serve.worker.sampling_columns import TOP_K, TOP_P, SamplingColumns, Wish

VOCAB = 100


def admitted(sampling: SamplingParams, *, seed: int = 0) -> SamplingColumns:
    columns = SamplingColumns(4, VOCAB, seed)
    columns.admit(2, sampling, num_prompt_tokens=5)
    return columns


@pytest.mark.parametrize(
    ("sampling", "wishes"),
    [
        (SamplingParams(temperature=0.0), Wish(0)),
        (SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=3), Wish(0)),
        (SamplingParams(), Wish.RANDOM),
        (SamplingParams(top_k=VOCAB), Wish.RANDOM),
        (SamplingParams(top_k=VOCAB - 1), Wish.RANDOM | Wish.TOP),
        (SamplingParams(top_p=0.99), Wish.RANDOM | Wish.TOP),
        (SamplingParams(min_p=0.01), Wish.RANDOM | Wish.MIN_P),
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
    numbers = admitted(SamplingParams(top_k=-1, top_p=1.0)).numbers[2]
    assert numbers[TOP_K] == VOCAB
    assert numbers[TOP_P] > 1.0


def test_unseeded_requests_get_seeds_from_the_engines_and_seeded_ones_keep_theirs() -> None:
    def seeds(engine_seed: int) -> list[int]:
        columns = SamplingColumns(4, VOCAB, engine_seed)
        for row in range(3):
            columns.admit(row, SamplingParams(), 1)
        columns.admit(3, SamplingParams(seed=-(2**63)), 1)
        return [int(seed) for seed in columns.seeds]

    assert seeds(1) == seeds(1)
    assert seeds(1)[3] == seeds(2)[3] == -(2**63)
    assert len({*seeds(1)[:3], *seeds(2)[:3]}) == 6
