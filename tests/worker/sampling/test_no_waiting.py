"""Sampling never makes the host wait for the device, nor copies a single number to it.

On a GPU either waits for all that is queued, which undoes the overlap of steps for everybody in the
batch. gpu_check tries the same on a card, where CUDA itself tells.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serve.kernels.sampling import SamplingKernels
from serve.sampling_params import SamplingParams
from serve.worker.sampling.sampler import LogprobsMode
from tests.worker.harness import Asked, SamplerStand

VOCAB = 50
ASKS_THE_DEVICE = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"seed": 1, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "random with logprobs": {"seed": 1, "temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 1.0}},
    "allowed tokens": {"temperature": 0.0, "allowed_token_ids": [5, 6, 7]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": [9]},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": [[5, 6], [7]]},
}


class NoWaiting(TorchDispatchMode):
    """Forbids operations that wait on a GPU. A lifted tensor is one that Python made of host data:
    with a dimension it is what the uploads send, without one a number on its way by itself."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ASKS_THE_DEVICE, f"{function} reads the device"
        assert name != "lift_fresh" or args[0].dim(), f"{args[0]} is sent alone"
        if name in ("index", "index_put_"):
            assert not [i for i in args[1] if i is not None and i.dtype is torch.bool], (
                "a mask as an index counts on the host"
            )
        return function(*args, **(kwargs or {}))


def draw(
    logits: torch.Tensor,
    controls: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """In place of the GPU's own draw, which is one launch."""
    return torch.argmax(logits, dim=-1, out=out)


def penalize(
    logits: torch.Tensor,
    controls: torch.Tensor,
    generated: torch.Tensor,
    in_prompt: torch.Tensor,
) -> None:
    """In place of the GPU's own penalties."""


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("wish", WISHES)
def test_no_wish_makes_the_host_wait(wish: str, mode: LogprobsMode) -> None:
    asked = [Asked(SamplingParams(**WISHES[wish])), Asked(SamplingParams(temperature=0.0))]
    stand = SamplerStand(VOCAB, asked, mode, kernels=SamplingKernels(draw, penalize))
    rows = stand.rows.rows_of(["0", "1"])
    on_device = torch.from_numpy(rows)
    with NoWaiting():
        sampled = stand.sample(torch.zeros(2, VOCAB))
        stand.rows.record(rows, on_device, sampled.token_ids)
    assert sampled.token_ids.shape == (2,)


@pytest.mark.parametrize(
    "waits",
    [
        lambda logits, row: logits.new_tensor(1.0),
        lambda logits, row: logits.__setitem__(row, -torch.inf),
        lambda logits, row: logits[0, 0].item(),
        lambda logits, row: logits[logits > 1],
    ],
    ids=["a new number", "a number written", "a number read", "a mask"],
)
def test_what_would_wait_is_seen(waits: Any) -> None:
    logits, row = torch.zeros(2, VOCAB), torch.tensor([1])
    with NoWaiting():
        logits.index_fill_(0, row, 0.0)  # a number that is part of the launch is no copy
        with pytest.raises(AssertionError):
            waits(logits, row)
