from __future__ import annotations

import torch

from serve.worker.sampling.logprobs import PendingLogprobs, concatenate, score
from tests.worker.harness import cpu

LOGITS = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, -torch.inf, 1.0, 0.0]])


def test_scores_hold_the_token_its_rank_and_the_best() -> None:
    scores = score(LOGITS, torch.tensor([3, 2]), num_top=2)
    raw = LOGITS.log_softmax(-1)
    assert torch.allclose(scores.logprobs, torch.stack([raw[0, 3], raw[1, 2]]))
    assert scores.ranks.tolist() == [1, 2]  # equal logits share the better rank
    assert sorted(scores.top_token_ids[0].tolist()) == [1, 3]
    assert scores.top_token_ids[1].tolist() == [0, 2]
    assert torch.allclose(scores.top_logprobs[1], raw[1, [0, 2]])


def test_asking_for_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    assert score(LOGITS, torch.tensor([3, 2]), num_top=99).top_token_ids.shape == (2, 4)


def test_each_token_gets_as_many_alternatives_as_it_asked_for() -> None:
    parts = [score(LOGITS[i : i + 1], torch.tensor([0]), num_top=3) for i in range(2)]
    first, second = PendingLogprobs(concatenate(parts), cpu()).wait([0, 3])
    assert (first.token_id, first.rank, first.top_token_ids, first.top_logprobs) == (0, 4, [], [])
    assert second.top_token_ids == [0, 2, 3]
    assert second.logprob == second.top_logprobs[0]
