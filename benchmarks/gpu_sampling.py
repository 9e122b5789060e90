"""Speed of every kind of random draw."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_machine import Machine
from benchmarks.gpu_plan import Row
from serve.kernels.triton import sampling

KINDS = {  # temperature, top_k, top_p, min_p; 0 and 2 are off
    "greedy": (0.0, 0, 2.0, 0.0),
    "temperature": (1.0, 0, 2.0, 0.0),
    "min_p": (1.0, 0, 2.0, 0.05),
    "top_p": (1.0, 0, 0.9, 0.0),
    "top_k": (1.0, 20, 2.0, 0.0),
    "top_k and top_p": (0.6, 20, 0.95, 0.0),  # as Qwen 3 ships
}


def draw_rows(machine: Machine) -> Iterator[Row]:
    """One draw for a whole batch, and the rate at which its logits pass once."""
    vocabularies, batches = machine.draws
    for vocab in vocabularies:
        for batch in batches:
            # Spread like a language model's: a few likely tokens before a long tail.
            logits = torch.randn(batch, vocab, device=machine.device) * 4
            keys = torch.randint(2**31 - 1, (batch, 2), device=machine.device).int()
            for kind, (temperature, top_k, top_p, min_p) in KINDS.items():
                row = [temperature, float(top_k or vocab), top_p, min_p]
                controls = torch.tensor([row] * batch, device=machine.device)
                time = machine.seconds(partial(sampling.draw, logits, controls, keys))
                yield {
                    "vocabulary": vocab,
                    "batch": batch,
                    "kind": kind,
                    "microseconds": time * 1e6,
                    "GB/s of one pass": logits.numel() * 4 / time / 1e9,
                }
