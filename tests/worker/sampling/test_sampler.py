"""What the sampler chooses, alone and in company."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from serve.engine.request_limits import with_seed
from serve.sampling_params import SamplingParams
from tests.worker.harness import Asked, SamplerStand, row_data, sample

VOCAB = 8
# 0.999 quantiles of chi-square by degrees of freedom; seeds are fixed, so a passing test stays so.
CHI_SQUARE = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}


def random_logits(rows: int, vocab_size: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def seeded(seed: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, **more)  # type: ignore[arg-type]


def assert_distribution(sampling: SamplingParams, logits: Tensor, expected: Tensor) -> None:
    """4000 draws with different seeds against a distribution, by chi-square."""
    draws = 4000
    asked = [Asked(replace(sampling, seed=seed)) for seed in range(draws)]
    tokens = torch.tensor(sample(logits.expand(draws, -1), asked))
    counts = tokens.bincount(minlength=len(logits)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, counts
    wanted = expected[possible].double() * draws
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum()
    if (freedom := int(possible.sum()) - 1) > 0:
        assert chi_square < CHI_SQUARE[freedom], (counts, wanted)


SKEWED = torch.log(torch.tensor([0.4, 0.05, 0.2, 0.1, 0.05, 0.1, 0.06, 0.04]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    expected = (SKEWED / temperature).softmax(-1)
    assert_distribution(SamplingParams(temperature=temperature), SKEWED, expected)


def test_top_k_keeps_the_k_most_likely_and_their_proportions() -> None:
    expected = torch.tensor([0.4, 0, 0.2, 0.1, 0, 0.1, 0, 0]) / 0.8
    assert_distribution(SamplingParams(top_k=4), SKEWED, expected)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # 0.4 + 0.2 = 0.6 falls short of 0.65, so one token of 0.1 is in, and only one.
    logits = torch.log(torch.tensor([0.4, 0.05, 0.2, 0.11, 0.05, 0.09, 0.06, 0.04]))
    expected = torch.tensor([0.4, 0, 0.2, 0.11, 0, 0, 0, 0]) / 0.71
    assert_distribution(SamplingParams(top_p=0.65), logits, expected)


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the best three (0.4, 0.2, 0.11 of 0.71) the first two hold 0.845 of the probability.
    logits = torch.log(torch.tensor([0.4, 0.05, 0.2, 0.11, 0.05, 0.09, 0.06, 0.04]))
    expected = torch.tensor([0.4, 0, 0.2, 0, 0, 0, 0, 0]) / 0.6
    assert_distribution(SamplingParams(top_k=3, top_p=0.8), logits, expected)


def test_min_p_drops_tokens_by_their_share_of_the_best() -> None:
    expected = torch.tensor([0.4, 0, 0.2, 0.1, 0, 0.1, 0, 0]) / 0.8
    assert_distribution(SamplingParams(min_p=0.2), SKEWED, expected)


def test_min_p_counts_after_temperature() -> None:
    # At temperature 0.5 the 0.2 token has a quarter of the best one's probability.
    expected = torch.tensor([0.16, 0, 0.04, 0, 0, 0, 0, 0]) / 0.2
    assert_distribution(SamplingParams(temperature=0.5, min_p=0.1), SKEWED, expected)


def test_logit_bias_shifts_the_distribution() -> None:
    bias = {1: 2.0, 7: -100.0}
    shifted = SKEWED.clone()
    shifted[1] += 2.0
    shifted[7] = -torch.inf
    assert_distribution(SamplingParams(logit_bias=bias), SKEWED, shifted.softmax(-1))


def test_only_allowed_tokens_are_drawn() -> None:
    expected = torch.tensor([0, 0.05, 0.2, 0, 0, 0, 0, 0]) / 0.25
    assert_distribution(SamplingParams(allowed_token_ids=(2, 1, 99, -1)), SKEWED, expected)


def test_requests_whose_seeds_the_front_drew_keep_to_the_distribution() -> None:
    draws, seeds = 2000, Random(0)
    asked = [Asked(with_seed(SamplingParams(), seeds)) for _ in range(draws)]
    counts = torch.tensor(sample(SKEWED.expand(draws, -1), asked)).bincount(minlength=VOCAB)
    chi_square = ((counts - SKEWED.exp() * draws) ** 2 / (SKEWED.exp() * draws)).sum()
    assert chi_square < CHI_SQUARE[7]


def test_a_wide_nucleus_is_exact_beyond_the_first_candidates() -> None:
    """Equal tokens need most of a vocabulary that is larger than the first look at it."""
    vocab_size, draws, top_p = 3000, 300, 0.9
    logits = torch.zeros(vocab_size) + 1e-3 * torch.arange(vocab_size, 0, -1) / vocab_size
    asked = [Asked(seeded(seed, top_p=top_p)) for seed in range(draws)]
    tokens = torch.tensor(sample(logits.expand(draws, -1), asked))
    assert int(tokens.max()) <= top_p * vocab_size
    counts = (tokens // 675).bincount(minlength=4)  # four equal parts of the nucleus
    assert ((counts - draws / 4) ** 2 / (draws / 4)).sum() < CHI_SQUARE[3]


def test_top_k_beyond_the_first_candidates_is_exact() -> None:
    vocab_size, draws, top_k = 3000, 300, 1500
    logits = torch.zeros(vocab_size) + 1e-3 * torch.arange(vocab_size, 0, -1) / vocab_size
    asked = [Asked(seeded(seed, top_k=top_k, top_p=0.8)) for seed in range(draws)]
    tokens = torch.tensor(sample(logits.expand(draws, -1), asked))
    assert 1100 < int(tokens.max()) <= 1200


# ------------------------------------------------------------------------ who shares the batch


STRANGERS = [
    SamplingParams(seed=9),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=9, temperature=0.3, top_p=0.4, min_p=0.1),
    SamplingParams(seed=9, top_k=3, presence_penalty=2.0, frequency_penalty=1.0),
    SamplingParams(seed=9, repetition_penalty=2.0, logit_bias={3: 50.0}, logprobs=3),
    SamplingParams(seed=9, allowed_token_ids=(1, 2), min_tokens=3, stop_token_ids=(1,)),
    SamplingParams(bad_words_token_ids=((4,), (0, 5)), temperature=0.0),
]
ASKED = [
    SamplingParams(temperature=0.0),
    seeded(42, temperature=0.8),
    seeded(42, top_p=0.9),
    seeded(-7, top_k=5),
    seeded(0, min_p=0.05, frequency_penalty=0.5),
]


@pytest.mark.parametrize("asked", ASKED)
def test_smp_01_02_10_14_a_row_draws_the_same_alone_and_anywhere_in_any_batch(
    asked: SamplingParams,
) -> None:
    own = random_logits(1, seed=1)
    request = Asked(asked, prompt=(1, 2, 3), generated=(4, 4))
    alone = sample(own, [request])
    others = random_logits(len(STRANGERS), seed=2)
    for place in range(len(STRANGERS) + 1):
        logits = torch.cat([others[:place], own, others[place:]])
        batch = [Asked(s, prompt=(9, 8), generated=(7,)) for s in STRANGERS]
        batch.insert(place, request)
        assert sample(logits, batch)[place : place + 1] == alone


def test_smp_02_identical_seeded_requests_agree_and_other_seeds_do_not() -> None:
    logits = random_logits(1).expand(20, -1) / 3
    same = sample(logits, [seeded(7)] * 20)
    assert len(set(same)) == 1
    assert len(set(sample(logits, [seeded(n) for n in range(20)]))) > 5


def test_a_seeds_draws_change_with_the_position_only() -> None:
    logits = torch.zeros(40, 50)
    asked = [Asked(seeded(7), prompt=[0] * n) for n in range(1, 41)]
    tokens = sample(logits, asked)
    assert len(set(tokens)) > 15
    # The same position after other tokens: the noise is the same, the logits decide.
    assert sample(logits[:1], [Asked(seeded(7), prompt=[1, 2], generated=[3])]) == tokens[2:3]


def test_preemption_does_not_change_a_seeded_draw() -> None:
    """After recompute the request is admitted anew, to another row, with its generated tokens."""
    logits = random_logits(1)
    whole = Asked(seeded(5, frequency_penalty=1.0), prompt=[1, 2], generated=[3, 3, 9])
    stand = SamplerStand(50, [Asked(seeded(9)), whole])
    before = stand.sample(logits.expand(2, -1)).token_ids[1]
    stand.rows.release(["1", "0"])
    stand.rows.admit(row_data("1", whole))
    stand.rows.admit(row_data("0", Asked(seeded(9))))
    assert stand.sample(logits.expand(2, -1)).token_ids[1] == before


# ------------------------------------------------------------------------ extremes


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1.1e-5, 1e-6, 1e-30])
def test_smp_05_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(2)
    logits[0, :10] = 1e4
    logits[0, 11] = 3e4
    bias = {1: -100.0, 2: -100.0}
    asked = SamplingParams(temperature=temperature, logit_bias=bias, seed=1)
    assert sample(logits, [asked, seeded(1)])[0] == 11
    assert sample(logits, [asked, seeded(1)])[1] == sample(logits[1:], [seeded(1)])[0]


@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1e-3])
def test_smp_06_tiny_top_p_is_greedy(top_p: float) -> None:
    logits = random_logits(30)
    best = logits.argmax(-1).tolist()
    assert sample(logits, [seeded(n, top_p=top_p) for n in range(30)]) == best


def test_smp_06_top_p_one_filters_nothing() -> None:
    assert_distribution(SamplingParams(top_p=1.0), SKEWED, SKEWED.exp())


def test_top_k_one_is_greedy_and_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = random_logits(20)
    one = sample(logits, [seeded(n, top_k=1) for n in range(20)])
    assert one == logits.argmax(-1).tolist()
    plain = sample(logits, [seeded(n) for n in range(20)])
    assert sample(logits, [seeded(n, top_k=10**6) for n in range(20)]) == plain
    assert sample(logits, [seeded(n, top_k=-1) for n in range(20)]) == plain


def test_infinite_logits_are_never_drawn_and_never_nan() -> None:
    logits = torch.full((40, VOCAB), -torch.inf)
    logits[:, 3] = 1.0
    asked = [seeded(n, top_p=0.9) if n % 2 else seeded(n, temperature=1.9) for n in range(40)]
    assert set(sample(logits, asked)) == {3}


def test_contradicting_wishes_still_give_a_token_and_leave_neighbours_alone() -> None:
    """Only token 2 is allowed, but it ends the request, which min_tokens forbids yet."""
    asked = seeded(9, allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=4, max_tokens=9)
    logits = random_logits(2)
    for temperature in (0.0, 1.0):
        tokens = sample(logits, [replace(asked, temperature=temperature), seeded(3)])
        assert tokens == [2, *sample(logits[1:], [seeded(3)])]


def test_wholly_disallowed_rows_do_not_poison_the_batch() -> None:
    logits = random_logits(2)
    nothing = seeded(9, allowed_token_ids=(999,), top_p=0.5)
    assert sample(logits, [nothing, seeded(3)])[1] == sample(logits[1:], [seeded(3)])[0]


# ------------------------------------------------------------------------ logprobs


def test_log_01_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(3)
    asked = [
        Asked(seeded(9, logprobs=4, top_k=1)),
        Asked(SamplingParams(temperature=0.0)),
        Asked(
            seeded(1, logprobs=0, temperature=2.0, logit_bias={7: 100.0}, frequency_penalty=2.0),
            generated=(7,),
        ),
    ]
    output = SamplerStand(50, asked).sample(logits)
    scores = output.logprobs
    assert scores is not None
    assert output.logprob_places == [0, 2]
    raw = logits.log_softmax(-1)
    assert output.token_ids[2] == 7
    assert torch.allclose(scores.logprobs[0], raw[0].max())
    assert torch.allclose(scores.logprobs[1], raw[2, 7])
    assert scores.ranks.tolist() == [1, 1 + int((raw[2] > raw[2, 7]).sum())]
    assert torch.allclose(scores.top_logprobs[0], raw[0].topk(4).values)
    assert scores.top_token_ids[0].tolist() == raw[0].topk(4).indices.tolist()


def test_processed_logprobs_are_those_of_the_distribution_drawn_from() -> None:
    logits = random_logits(6)
    asked = [
        Asked(seeded(1, logprobs=50, temperature=0.7, top_k=5)),
        Asked(seeded(2, logprobs=50, temperature=2.0, top_p=0.8)),
        Asked(seeded(3, logprobs=50, min_p=0.2, logit_bias={7: 5.0})),
        Asked(SamplingParams(temperature=0, logprobs=50, allowed_token_ids=(3, 4, 5))),
        Asked(seeded(4, logprobs=50)),
        Asked(seeded(5, temperature=0.7, top_k=5)),  # asks for none
    ]

    raw = SamplerStand(50, asked).sample(logits)
    processed = SamplerStand(50, asked, "processed_logprobs").sample(logits)

    assert torch.equal(processed.token_ids, raw.token_ids)
    assert processed.logprob_places == [0, 1, 2, 3, 4]
    scores = processed.logprobs
    assert scores is not None
    assert torch.isfinite(scores.logprobs).all()
    by_id = torch.empty(5, 50).scatter_(1, scores.top_token_ids, scores.top_logprobs)
    probabilities = by_id.exp()
    assert torch.allclose(probabilities.sum(-1), torch.ones(5))
    kept = probabilities > 0
    assert kept[0].sum() == 5
    assert torch.allclose(by_id[0][kept[0]], (logits[0] / 0.7)[kept[0]].log_softmax(-1))
    share = (logits[1] / 2).softmax(-1)
    assert share[kept[1]].sum() >= 0.8 > share[kept[1]].sum() - share[kept[1]].min()
    biased = logits[2].clone()
    biased[7] += 5
    assert torch.equal(kept[2], biased.softmax(-1) >= 0.2 * biased.softmax(-1).max())
    assert kept[3].nonzero().flatten().tolist() == [3, 4, 5]
    assert torch.allclose(by_id[4], logits[4].log_softmax(-1), atol=1e-5)


def test_a_batch_without_wishes_takes_the_argmax_and_nothing_else() -> None:
    logits = random_logits(5)
    stand = SamplerStand(50, [Asked(SamplingParams(temperature=0.0))] * 5)
    rows = torch.arange(5).numpy()
    given = logits.clone()
    output = stand.sampler.sample(given, rows, rows)
    assert output.token_ids.tolist() == logits.argmax(-1).tolist()
    assert output.logprobs is None
    assert torch.equal(given, logits)
