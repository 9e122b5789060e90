"""A slow twin of the draw, by sorting in fp64, and batches for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serve.sampling_params import SamplingParams
from serve.worker.sampling.noise import gumbel, noise_keys, token_hashes
from tests.worker.harness import Asked

EVERY_WISH = [
    Asked(wish, prompt=range(5), generated=[number, number, 7])
    for number, wish in enumerate(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(seed=1),
            SamplingParams(seed=2, temperature=0.6, top_k=20),
            SamplingParams(seed=3, top_p=0.8, logprobs=1),
            SamplingParams(seed=4, min_p=0.1, frequency_penalty=0.4),
            SamplingParams(seed=6, temperature=1.3, top_k=1),
            SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.2),
            SamplingParams(seed=5, top_k=50, top_p=0.7, min_p=0.01, allowed_token_ids=(3, 7, 900)),
        ]
    )
]

OFF = {"temperature": 1.0, "top_k": 2.0**24, "top_p": 2.0, "min_p": 0.0}


def controls(rows: int, **wishes: float) -> Tensor:
    """[rows, 4]: the same wishes for each."""
    return torch.tensor(list((OFF | wishes).values())).repeat(rows, 1)


def keys(rows: int, first_seed: int = 0) -> Tensor:
    """[rows, 2]: a seed for each."""
    seeds = np.arange(first_seed, first_seed + rows)
    return torch.from_numpy(noise_keys(seeds, np.full(rows, 17)))


def allowed(logits: Tensor, wishes: Tensor) -> Tensor:
    """Logits [S, V] after temperature, min_p, top_k and top_p, -inf where a token is out; tokens
    as likely as the last one that is in are in, too."""
    temperature, top_k, top_p, min_p = wishes.double().split(1, dim=1)
    lowest = torch.finfo(torch.float32).min
    scaled = (
        (logits - logits.amax(-1, keepdim=True).clamp(min=lowest)) / temperature.float()
    ).double()
    scaled = scaled.masked_fill(scaled < min_p.log(), -torch.inf)
    last = top_k.clamp(max=logits.shape[1]).long() - 1
    scaled = scaled.masked_fill(scaled < _sorted(scaled).gather(1, last), -torch.inf)
    ordered = _sorted(scaled)
    mass = ordered.softmax(-1)
    outside = mass.cumsum(-1) - mass >= top_p
    outside[:, 0] = False
    edge = ordered.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
    return scaled.masked_fill(scaled < edge, -torch.inf)


def twin(logits: Tensor, wishes: Tensor, keys: Tensor) -> Tensor:
    """One token per row [S]."""
    noise = gumbel(token_hashes(logits.shape[1], logits.device), keys)
    return (allowed(logits, wishes).float() + noise).argmax(-1)


def penalized(logits: Tensor, wishes: Tensor, generated: Tensor, in_prompt: Tensor) -> Tensor:
    """Logits [S, V] after presence, frequency and repetition penalties, wishes [S, 3]."""
    presence, frequency, repetition = wishes[:, :, None].unbind(1)
    weakened = torch.where(logits > 0, logits / repetition, logits * repetition)
    weakened = torch.where((generated > 0) | in_prompt, weakened, logits)
    return weakened - (frequency * generated + presence * (generated > 0))


def _sorted(scaled: Tensor) -> Tensor:
    return scaled.sort(dim=-1, descending=True).values
