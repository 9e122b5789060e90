"""Argmax, draws, penalties and scores in C++ against the sampler's torch code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.sampling import LogprobTensors, SamplingKernels
from serve.worker.sampling.logprobs import score
from tests.kernels.cpu_kernels import compiled
from tests.kernels.sampling_twin import EVERY_WISH, allowed, controls, keys, penalized, twin
from tests.worker.harness import SamplerStand

VOCAB = 1500  # one whole block of maxima, and a part


def kernels(num_threads: int = 2) -> SamplingKernels:
    sampling = compiled(num_threads).sampling
    assert sampling is not None
    return sampling


def argmax(logits: Tensor) -> list[int]:
    ours = kernels().argmax
    assert ours is not None
    return ours(logits, torch.empty(len(logits), dtype=torch.int64)).tolist()


def draw(logits: Tensor, num_threads: int = 2, first_seed: int = 0, **wishes: float) -> list[int]:
    """One seed for each row, the same wishes for all."""
    rows = len(logits)
    drawn = kernels(num_threads).draw(logits, controls(rows, **wishes), keys(rows, first_seed))
    return drawn.tolist()


# ------------------------------------------------------------------------ argmax


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1024, 1025, 5000])
def test_argmax_is_torchs(vocab_size: int) -> None:
    logits = torch.randn(40, vocab_size)

    assert argmax(logits) == logits.argmax(-1).tolist()


def test_of_equal_maxima_the_lowest_id_wins() -> None:
    logits = torch.randint(0, 3, (20, VOCAB)).float()
    logits[0] = 1.0
    logits[1] = -torch.inf

    first = [(row == row.max()).nonzero()[0].item() for row in logits]

    assert argmax(logits) == first
    assert draw(logits, temperature=0.0) == first


def test_nan_is_never_chosen() -> None:
    logits = torch.randn(4, VOCAB)
    logits[0, :1400] = torch.nan
    logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3] = torch.nan
    logits[3, 1450] = -torch.inf
    without = logits.nan_to_num(nan=-torch.inf)[:2]

    assert argmax(logits) == [*without.argmax(-1).tolist(), 0, 1450]
    assert draw(logits, top_p=0.9)[:2] == draw(without, top_p=0.9)
    assert draw(logits, top_k=5)[2:] == [0, 1450]


# ------------------------------------------------------------------------ draws


@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.sampled_from([1, 2, 16, 17, 1024, 1500]),
    spread=st.sampled_from([1e-3, 1.0, 4.0, 20.0]),
    steps=st.sampled_from([0, 4]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.one_of(st.just(2.0**24), st.integers(1, 1600)),
    top_p=st.one_of(st.just(2.0), st.floats(1e-6, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
)
@settings(deadline=None, max_examples=150)
def test_a_draw_is_what_sorting_would_draw(
    seed: int,
    vocab_size: int,
    spread: float,
    steps: int,
    banned: float,
    temperature: float,
    top_k: float,
    top_p: float,
    min_p: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * spread
    if steps:  # many equal ones
        logits = (logits * steps / spread).round() * spread
    logits[torch.rand(3, vocab_size, generator=generator) < banned] = -torch.inf
    wishes = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}

    drawn = draw(logits, first_seed=seed, **wishes)

    assert drawn == twin(logits, controls(3, **wishes), keys(3, seed)).tolist()


@pytest.mark.parametrize("wishes", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 50}])
def test_a_large_vocabulary_draws_what_sorting_would_draw(wishes: dict[str, float]) -> None:
    logits = torch.randn(24, 60_000) * 2
    expected = twin(logits, controls(24, **wishes), keys(24)).tolist()

    assert draw(logits, **wishes) == expected


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_by_chi_square(wishes: dict[str, float]) -> None:
    logits = torch.log(torch.tensor([0.4, 0.05, 0.2, 0.11, 0.05, 0.09, 0.06, 0.04]))
    draws = 4000
    expected = allowed(logits[None], controls(1, **wishes))[0].softmax(-1) * draws

    counts = torch.tensor(draw(logits.expand(draws, -1), **wishes)).bincount(minlength=8)

    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 24.3  # the 0.999 quantile for 7 degrees of freedom; seeds are fixed


def test_a_row_draws_the_same_alone_in_company_and_on_any_number_of_threads() -> None:
    logits = torch.randn(9, VOCAB) * 3
    wishes = {"top_k": 700, "top_p": 0.95, "temperature": 1.2}

    together = draw(logits, **wishes)

    assert draw(logits, num_threads=1, **wishes) == together
    for row in range(9):
        assert draw(logits[row : row + 1], first_seed=row, **wishes) == together[row : row + 1]


def test_equally_likely_tokens_at_the_edge_are_all_in_play() -> None:
    logits = torch.full((40, VOCAB), -5.0)
    logits[:, [3, 900, 1200]] = 1.0

    for wishes in ({"top_k": 2}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert set(draw(logits, **wishes)) == {3, 900, 1200}


def test_the_only_allowed_token_is_drawn_and_where_none_is_the_first() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, 1234] = -2.0

    for wishes in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 1e-30}):
        assert draw(logits, **wishes) == [1234, 0]


def test_a_banned_token_beats_tokens_that_are_not_allowed() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 77] = torch.finfo(torch.float32).min

    assert draw(logits, top_p=0.5) == [77]


def test_extreme_numbers_end_and_stay_within_the_vocabulary() -> None:
    logits = torch.randn(6, VOCAB) * 1e4
    logits[1, 700] = torch.inf
    best = logits.argmax(-1).tolist()

    assert draw(logits, temperature=1e-5) == best
    assert draw(logits, top_p=1e-30) == best
    assert draw(logits, top_p=0.0) == best
    assert draw(logits, top_k=1) == best
    for token in draw(logits, temperature=1e38, top_p=0.9):
        assert 0 <= token < VOCAB


def test_strides_of_logits_and_controls_are_respected() -> None:
    wide = torch.randn(6, VOCAB + 36) * 3
    wishes = torch.cat([controls(6, temperature=0.8), torch.full((6, 3), 9.0)], dim=1)

    drawn = kernels().draw(wide[:, :VOCAB], wishes, keys(6)).tolist()

    assert drawn == draw(wide[:, :VOCAB].contiguous(), temperature=0.8)


def test_keys_of_another_batch_are_refused() -> None:
    with pytest.raises(AssertionError):
        kernels().draw(torch.zeros(2, VOCAB), controls(2), keys(3))


def test_no_rows_draw_nothing() -> None:
    assert draw(torch.zeros(0, VOCAB)) == []


def test_the_sampler_gives_the_same_tokens_and_scores_through_these_kernels() -> None:
    """A batch of all wishes, greedy and random, penalized and not, as a server would see it."""
    plain = SamplerStand(VOCAB, EVERY_WISH)
    through = SamplerStand(VOCAB, EVERY_WISH, kernels=kernels())
    for grid in (1e-6, 0.5, 2.0):  # from no equal logits to many
        logits = (torch.randn(len(EVERY_WISH), VOCAB) * 3 / grid).round() * grid

        expected, sampled = plain.sample(logits), through.sample(logits)

        assert sampled.token_ids.tolist() == expected.token_ids.tolist()
        assert sampled.logprobs is not None
        assert expected.logprobs is not None
        assert torch.equal(sampled.logprobs.ranks, expected.logprobs.ranks)
        torch.testing.assert_close(sampled.logprobs.logprobs, expected.logprobs.logprobs)


# ------------------------------------------------------------------------ penalties


def test_penalties_have_the_bits_of_the_samplers() -> None:
    logits = torch.randn(3, VOCAB) * 4
    generated = torch.randint(0, 40, (3, VOCAB), dtype=torch.int32).sub_(36).clamp_(min=0)
    in_prompt = torch.rand(3, VOCAB) < 0.05
    wishes = torch.tensor([[0.5, 0.25, 1.3], [-1.0, 0.0, 0.8], [0.0, 0.0, 1.0]])
    expected = penalized(logits, wishes, generated, in_prompt)

    kernels().penalize(logits, wishes, generated, in_prompt)

    assert torch.equal(logits, expected)


# ------------------------------------------------------------------------ scores


def scores_of(logits: Tensor, token_ids: Sequence[int], num_top: int) -> LogprobTensors:
    ours = kernels().score
    assert ours is not None
    return ours(logits, torch.tensor(token_ids), num_top)


@pytest.mark.parametrize("num_top", [0, 1, 20, 300, VOCAB, 2 * VOCAB])
def test_scores_are_the_samplers(num_top: int) -> None:
    # All different: torch leaves open in which order equals are listed, as random ones now and then
    # are. Those have a test of their own.
    logits = torch.stack([torch.randperm(VOCAB) for _ in range(7)]) * 0.01
    token_ids = [0, 3, 77, 800, 1023, 1024, 1499]

    ours = scores_of(logits, token_ids, num_top)

    theirs = score(logits, torch.tensor(token_ids), num_top)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(ours.top_logprobs, theirs.top_logprobs, atol=2e-6, rtol=2e-6)
    assert torch.equal(ours.top_token_ids, theirs.top_token_ids)
    assert torch.equal(ours.ranks, theirs.ranks)


def test_equal_logits_share_the_better_rank_and_are_listed_by_id() -> None:
    logits = torch.full((1, VOCAB), -3.0)
    logits[0, [5, 1100, 30]] = 2.0

    for token, rank in ((1100, 1), (6, 4)):
        scores = scores_of(logits, [token], 6)
        assert scores.ranks.tolist() == [rank]
        assert scores.top_token_ids.tolist() == [[5, 30, 1100, 0, 1, 2]]


def test_what_is_not_allowed_scores_minus_infinity_and_nothing_is_nan() -> None:
    logits = torch.full((3, 20), -torch.inf)
    logits[0, 7] = 1.0
    logits[1] = torch.nan

    scores = scores_of(logits, [7, 3, 3], 4)

    assert scores.logprobs.tolist() == [0.0, -torch.inf, -torch.inf]
    assert scores.top_token_ids.tolist()[0] == [7, 0, 1, 2]
    assert scores.top_logprobs[0].tolist() == [0.0] + [-torch.inf] * 3
    assert not scores.top_logprobs.isnan().any()
    for ids in scores.top_token_ids.tolist():
        assert all(0 <= token < 20 for token in ids)


def test_the_best_are_listed_in_order() -> None:
    logits = torch.randn(5, VOCAB)

    scores = scores_of(logits, [0] * 5, 40)

    for row in scores.top_logprobs.tolist():
        assert all(first >= second for first, second in pairwise(row))
