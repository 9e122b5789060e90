"""Token masks in torch, in C++ and in Triton (interpreted), against bits unpacked one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from serve.kernels.sampling import MaskFn, SamplingKernels
from serve.kernels.triton.mask import mask as triton_mask
from serve.kernels.triton.penalties import penalize
from serve.kernels.triton.sampling import draw
from serve.worker.executor import TokenMask
from serve.worker.sampling.token_mask import mask_tokens
from tests.kernels.cpu_kernels import compiled
from tests.kernels.sampling_twin import EVERY_WISH
from tests.worker.harness import SamplerStand

VOCAB = 1500  # one whole tile and a part; no multiple of 32
KINDS = ["torch", "cpu", "triton"]


def cpu_kernels() -> SamplingKernels:
    sampling = compiled(2).sampling
    assert sampling is not None
    return sampling


def mask_fn(kind: str) -> MaskFn:
    if kind == "cpu":
        mask = cpu_kernels().mask
        assert mask is not None
        return mask
    return triton_mask if kind == "triton" else mask_tokens


def kernels(kind: str) -> SamplingKernels | None:
    if kind == "cpu":
        return cpu_kernels()
    return SamplingKernels(draw, penalize, mask=triton_mask) if kind == "triton" else None


def packed(allowed: Tensor) -> Tensor:
    """[M, vocab] bool → [M, ceil(vocab / 32)] int32; what is past the vocabulary is allowed."""
    padded = np.ones((len(allowed), -(-allowed.shape[1] // 32) * 32), dtype=np.bool_)
    padded[:, : allowed.shape[1]] = allowed.numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, VOCAB])
def test_named_rows_keep_the_tokens_whose_bits_are_set_and_others_keep_all(
    kind: str, vocab_size: int
) -> None:
    logits = torch.randn(6, vocab_size)
    rows = torch.tensor([4, 0, 3])
    allowed = torch.rand(3, vocab_size) < torch.tensor([[0.02], [0.5], [0.98]])
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, -torch.inf)

    mask_fn(kind)(logits, rows, packed(allowed))

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_none_or_no_rows_at_all(kind: str) -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    mask, none = mask_fn(kind), torch.zeros(0, -(-VOCAB // 32), dtype=torch.int32)

    mask(logits, torch.zeros(0, dtype=torch.int64), none)
    mask(logits, torch.tensor([0]), packed(torch.ones(1, VOCAB, dtype=torch.bool)))
    assert torch.equal(logits, before)

    mask(logits, torch.tensor([1]), packed(torch.zeros(1, VOCAB, dtype=torch.bool)))
    assert torch.equal(logits[0], before[0])
    assert bool((logits[1] == -torch.inf).all())


@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_bits_for_another_vocabulary_are_refused(kind: str) -> None:
    with pytest.raises(AssertionError):
        mask_fn(kind)(torch.zeros(1, 64), torch.tensor([0]), torch.zeros(1, 3, dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_comes_after_every_wish_and_each_row_draws_what_it_would_among_few(
    kind: str,
) -> None:
    """Against logits that were masked beforehand, which nothing but allowed_token_ids undoes."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(EVERY_WISH), VOCAB, generator=generator) * 3
    allowed = torch.rand(len(EVERY_WISH), VOCAB, generator=generator) < 0.1
    allowed[:, 3] = True
    masked = [0, 2, 3, 4, 6, 7]
    before = logits.clone()
    before[masked] = before[masked].masked_fill(~allowed[masked], -torch.inf)
    stand = SamplerStand(VOCAB, EVERY_WISH, kernels=kernels(kind))
    mask = TokenMask(np.array(masked), packed(allowed[masked]).numpy())

    through = stand.sample(logits, mask)

    plain = SamplerStand(VOCAB, EVERY_WISH).sample(before)
    assert through.token_ids.tolist() == plain.token_ids.tolist()
    assert through.excluded is not None
    assert through.excluded.tolist() == [False] * len(masked)
    assert all(bool(allowed[row, through.token_ids[row]]) for row in masked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_left_no_token_is_told(kind: str) -> None:
    """By the mask alone, and by what its request allows besides."""
    stand = SamplerStand(VOCAB, EVERY_WISH, kernels=kernels(kind))
    allowed = torch.zeros(3, VOCAB, dtype=torch.bool)
    allowed[1, 5] = allowed[2, 8] = True
    mask = TokenMask(np.array([1, 2, 7]), packed(allowed).numpy())

    sampled = stand.sample(torch.randn(len(EVERY_WISH), VOCAB), mask)

    assert sampled.excluded is not None
    assert sampled.excluded.tolist() == [True, False, True]
    assert sampled.token_ids[2] == 5
