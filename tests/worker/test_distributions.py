"""Samplers together: draws against a plain reckoning of the distribution that was asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from serve.sampling_params import SamplingParams
from tests.worker.harness import Asked, sample

PROBABILITIES = (0.3, 0.045, 0.2, 0.105, 0.055, 0.12, 0.095, 0.08)
PROMPT, GENERATED = (0, 0, 5), (2, 2, 3)
DRAWS = 1200


def expected(sampling: SamplingParams) -> list[float]:
    """Probabilities of the eight tokens, in vLLM's order: bias and bans, penalties, temperature,
    min_p, top_k, top_p."""
    logits = [math.log(p) for p in PROBABILITIES]
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in {*PROMPT, *GENERATED}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(GENERATED).items():
        logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    banned: set[int] = set()
    if sampling.allowed_token_ids:
        banned |= set(range(8)) - set(sampling.allowed_token_ids)
    if len(GENERATED) < sampling.min_tokens:
        banned |= set(sampling.stop_token_ids)
    for *start, last in sampling.bad_words_token_ids:
        if list((*PROMPT, *GENERATED)[len(PROMPT) + len(GENERATED) - len(start) :]) == start:
            banned.add(last)
    weights = [0.0 if t in banned else math.exp(v / sampling.temperature) for t, v in _each(logits)]
    best = max(weights)
    weights = [w if w >= sampling.min_p * best else 0.0 for w in weights]
    ranked = sorted(range(8), key=lambda t: -weights[t])
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    total, through, kept = sum(weights[t] for t in ranked), 0.0, set()
    for token in ranked:
        if through < sampling.top_p * total:
            kept.add(token)
        through += weights[token]
    weights = [w if t in kept else 0.0 for t, w in _each(weights)]
    return [w / sum(weights) for w in weights]


def _each(values: Sequence[float]) -> list[tuple[int, float]]:
    return list(enumerate(values))


SHAPES: dict[str, dict[str, object]] = {
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.83},
    "min_p": {"min_p": 0.22},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.7},
    "reward": {"frequency_penalty": -0.9, "presence_penalty": -0.3},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {1: 1.5, 0: -1.0, 6: -100.0}},
    "allowed": {"allowed_token_ids": (0, 1, 2, 3, 7)},
    "not yet": {"min_tokens": 4, "stop_token_ids": (0, 5)},
    "bad words": {"bad_words_token_ids": ((2, 3, 4), (7,), (3, 0), (1, 5))},
}
PAIRS = [
    ("cold", "top_k"),
    ("hot", "top_p"),
    ("top_k", "top_p"),
    ("top_k", "min_p"),
    ("top_p", "min_p"),
    ("repetition", "top_k"),
    ("frequency", "top_p"),
    ("presence", "min_p"),
    ("bias", "top_p"),
    ("allowed", "top_k"),
    ("not yet", "top_p"),
    ("bad words", "min_p"),
    ("reward", "repetition"),
]
CROWDS = [
    ("hot", "min_p", "top_k", "top_p"),
    ("cold", "presence", "frequency", "repetition", "bias"),
    ("hot", "repetition", "bias", "not yet", "bad words", "min_p", "top_k", "top_p"),
]


@pytest.mark.parametrize("names", [*((name,) for name in SHAPES), *PAIRS, *CROWDS], ids="+".join)
def test_draws_follow_the_distribution_that_was_asked_for(names: tuple[str, ...]) -> None:
    wishes: dict[str, object] = {}
    for name in names:
        wishes |= SHAPES[name]
    sampling = SamplingParams(**wishes)  # type: ignore[arg-type]
    logits = torch.log(torch.tensor(PROBABILITIES)).expand(DRAWS, -1)
    asked = [Asked(replace(sampling, seed=seed), PROMPT, GENERATED) for seed in range(DRAWS)]

    counts = Counter(sample(logits, asked))

    wanted = [p * DRAWS for p in expected(sampling)]
    assert not [token for token in counts if wanted[token] == 0]
    # Chi-square holds for expected counts of five and more: rarer tokens count as one.
    rare = [token for token in range(8) if wanted[token] < 5]
    bins = [[token] for token in range(8) if token not in rare]
    bins[-1] += rare
    chi_square = sum(
        (sum(counts[t] for t in tokens) - sum(wanted[t] for t in tokens)) ** 2
        / sum(wanted[t] for t in tokens)
        for tokens in bins
    )
    # 1 in 10,000 by chance for each number of bins; the seeds are fixed.
    assert chi_square < (1e-9, 15.2, 18.5, 21.2, 23.6, 25.8, 27.9, 29.9)[len(bins) - 1]
