"""The noise must be repeatable, independent of its company, and Gumbel distributed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from serve.worker.sampling.noise import gumbel, noise_keys, token_hashes

CPU = torch.device("cpu")


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(noise_keys(np.array(seeds), np.array(positions)))


def test_a_rows_noise_does_not_depend_on_the_rest_of_the_batch() -> None:
    hashes = token_hashes(1000, CPU)
    alone = gumbel(hashes, keys_of([42], [7]))
    crowd = gumbel(hashes, keys_of([1, -5, 42, 42], [7, 7, 7, 8]))
    assert torch.equal(alone[0], crowd[2])
    for other in (0, 1, 3):
        assert not torch.isclose(alone[0], crowd[other]).any()


def test_noise_of_chosen_tokens_equals_their_part_of_the_whole() -> None:
    hashes = token_hashes(1000, CPU)
    keys = keys_of([3, 4], [0, 0])
    ids = torch.tensor([[5, 999, 0], [7, 7, 1]])
    assert torch.equal(gumbel(hashes[ids], keys), gumbel(hashes, keys).gather(1, ids))


def test_making_noise_leaves_the_token_hashes_as_they_were() -> None:
    hashes = token_hashes(100, CPU)
    before = hashes.clone()
    gumbel(hashes, keys_of([1], [1]))
    assert torch.equal(hashes, before)
    assert len(hashes.unique()) == 100


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_noise_is_gumbel_distributed_along_each_of_its_inputs(vary: str) -> None:
    n = 200_000
    numbers = list(range(n))
    if vary == "token":
        noise = gumbel(token_hashes(n, CPU), keys_of([9], [9]))[0]
    else:
        seeds, positions = (numbers, [5] * n) if vary == "seed" else ([5] * n, numbers)
        noise = gumbel(token_hashes(3, CPU)[2:], keys_of(seeds, positions))[:, 0]
    assert noise.isfinite().all()
    # Kolmogorov-Smirnov against exp(-exp(-x)): the 99.9 % quantile is 1.95 / sqrt(n).
    uniform = torch.sort(torch.exp(-torch.exp(-noise.double()))).values
    expected = (torch.arange(n) + 0.5) / n
    assert (uniform - expected).abs().max() < 1.95 / math.sqrt(n)


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbouring_positions_and_tokens_are_uncorrelated(lag: int) -> None:
    noise = gumbel(token_hashes(400, CPU), keys_of([0] * 500, list(range(500)))).double()
    noise -= noise.mean()
    size = noise.numel()
    for shifted in (noise.roll(lag, 0), noise.roll(lag, 1), noise.roll((lag, lag), (0, 1))):
        correlation = (noise * shifted).mean() / noise.var()
        assert abs(correlation) < 4 / math.sqrt(size)


def test_negative_and_huge_seeds_give_finite_different_noise() -> None:
    keys = keys_of([-(2**63), 2**63 - 1, 0, -1], [0, 0, 0, 0])
    noise = gumbel(token_hashes(50, CPU), keys)
    assert noise.isfinite().all()
    assert len({tuple(row.tolist()) for row in noise}) == 4
