"""The draw and the penalties, interpreted, against the sampler's torch code."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.sampling import SamplingKernels
from serve.kernels.triton.penalties import penalize
from serve.kernels.triton.sampling import draw
from serve.sampling_params import SamplingParams
from tests.kernels.sampling_twin import EVERY_WISH, controls, keys, penalized, twin
from tests.worker.harness import Asked, SamplerStand

VOCAB = 9500  # one whole piece and a part, whose last tile is one, too


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 300, "top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_every_row_draws_what_sorting_would_draw(wishes: dict[str, float]) -> None:
    logits = torch.randn(6, VOCAB) * 3
    asked = controls(6, **wishes)

    assert draw(logits, asked, keys(6)).tolist() == twin(logits, asked, keys(6)).tolist()


@pytest.mark.parametrize("vocab", [700, VOCAB])
@pytest.mark.parametrize(
    ("kind", "wishes"),
    [
        ("flat", {"top_p": 0.5}),  # more tokens in play than a list holds
        ("flat", {"top_k": 3}),
        ("spread", {"top_k": 600}),  # more than there are tiles
        ("spread", {"temperature": 20.0, "top_k": 400, "top_p": 0.9}),
        ("peaked", {"top_k": 20, "top_p": 0.95}),  # nearly all lies beyond the list's end
        ("peaked", {"top_k": 600, "top_p": 0.99}),
        ("few", {"top_k": 20}),  # not as many tokens are possible
        ("few", {"top_p": 0.9, "min_p": 0.3}),
    ],
    ids=str,
)
def test_rows_whose_list_does_not_say_it_all_are_drawn_alike(
    vocab: int, kind: str, wishes: dict[str, float]
) -> None:
    logits = torch.randn(3, vocab) * 2
    if kind == "flat":
        logits[:] = 1.0
    elif kind == "peaked":
        logits[:, 17] = 60.0
        logits[:, 300] = 58.0
    elif kind == "few":
        logits[:, 3:-3] = float("-inf")
    asked = controls(3, **wishes)

    assert draw(logits, asked, keys(3)).tolist() == twin(logits, asked, keys(3)).tolist()


def test_rows_with_different_wishes_share_a_batch_and_a_seed_keeps_its_token() -> None:
    logits = torch.randn(4, VOCAB) * 3
    asked = torch.cat(
        [controls(1, **w) for w in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5})]
    )

    together = draw(logits, asked, keys(4))

    assert together.tolist() == twin(logits, asked, keys(4)).tolist()
    for row in range(4):
        alone = draw(logits[row : row + 1], asked[row : row + 1], keys(1, first_seed=row))
        assert alone.item() == together[row]


def test_temperature_zero_takes_the_first_of_the_most_likely() -> None:
    logits = torch.randn(2, VOCAB)
    logits[0, [7, 1300]] = 50.0
    logits[1, 1400] = 50.0

    assert draw(logits, controls(2, temperature=0.0), keys(2)).tolist() == [7, 1400]


def test_equally_likely_tokens_at_the_edge_of_top_k_are_all_in_play() -> None:
    logits = torch.full((12, VOCAB), -5.0)
    logits[:, [3, 900, 1200]] = 1.0

    assert set(draw(logits, controls(12, top_k=2), keys(12)).tolist()) == {3, 900, 1200}


def test_a_row_that_allows_a_single_token_or_none_ends() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[0, 1234] = -2.0

    drawn = draw(logits, controls(2, top_p=0.5, top_k=3), keys(2)).tolist()

    assert drawn[0] == 1234
    assert 0 <= drawn[1] < VOCAB


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = torch.randn(3, VOCAB) * 1000

    drawn = draw(logits, controls(3, temperature=1e-5, top_p=0.9), keys(3))

    assert drawn.tolist() == logits.argmax(-1).tolist()


def test_penalties_equal_the_formulas_of_the_sampler() -> None:
    logits = torch.randn(2, VOCAB) * 4
    generated = torch.randint(0, 3, (2, VOCAB), dtype=torch.int32)
    in_prompt = torch.rand(2, VOCAB) < 0.2
    wishes = torch.tensor([[0.5, 0.25, 1.3], [-1.0, 0.0, 0.8]])
    expected = penalized(logits, wishes, generated, in_prompt)

    penalize(logits, wishes, generated, in_prompt)

    torch.testing.assert_close(logits, expected)


def test_no_rows_draw_nothing() -> None:
    none = torch.zeros(0, VOCAB)

    assert draw(none, controls(0).reshape(0, 4), keys(0)).shape == (0,)
    penalize(none, torch.zeros(0, 3), none.int(), none.bool())


def test_keys_of_another_batch_are_refused() -> None:
    with pytest.raises(AssertionError):
        draw(torch.zeros(2, VOCAB), controls(2), keys(3))


def test_the_sampler_gives_the_same_tokens_through_these_kernels() -> None:
    """A batch of all wishes, greedy and random, penalized and not, as a server would see it."""
    plain = SamplerStand(VOCAB, EVERY_WISH)
    through = SamplerStand(VOCAB, EVERY_WISH, kernels=SamplingKernels(draw, penalize))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        logits = torch.randn(len(EVERY_WISH), VOCAB, generator=generator) * 3

        assert through.sample(logits).token_ids.tolist() == plain.sample(logits).token_ids.tolist()


def test_of_equally_likely_tokens_a_greedy_row_takes_the_first_in_any_company() -> None:
    asked = [Asked(SamplingParams(temperature=0.8, top_k=1)), Asked(SamplingParams(seed=1))]
    logits = torch.zeros(2, VOCAB)
    logits[0, [900, 1300]] = 2.0

    sampled = SamplerStand(VOCAB, asked, kernels=SamplingKernels(draw, penalize)).sample(logits)

    assert sampled.token_ids[0] == 900
