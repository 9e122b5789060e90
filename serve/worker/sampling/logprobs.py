"""Log-probabilities of tokens, by logits that the caller has chosen, on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from serve.kernels.sampling import LogprobTensors
from serve.messages import TokenLogprobs
from serve.worker.device.device import Device, PendingCopy


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Score tokens [L] by their rows of logits [L, vocab], and list each row's `num_top` best.

    Equal logits share the better rank.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    best, best_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogprobTensors(
        token_ids=token_ids,
        logprobs=(own - total).squeeze(1),
        ranks=(logits > own).sum(dim=-1) + 1,
        top_token_ids=best_ids,
        top_logprobs=best - total,
    )


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    """Scores of several slices with the same `num_top`, as one."""
    return LogprobTensors(
        token_ids=torch.cat([part.token_ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_token_ids=torch.cat([part.top_token_ids for part in parts]),
        top_logprobs=torch.cat([part.top_logprobs for part in parts]),
    )


class PendingLogprobs:
    """Scores on their way to the host."""

    def __init__(self, scores: LogprobTensors, device: Device) -> None:
        self._copies: list[PendingCopy] = [
            device.to_host(tensor)
            for tensor in (
                scores.token_ids,
                scores.logprobs,
                scores.ranks,
                scores.top_token_ids,
                scores.top_logprobs,
            )
        ]

    def wait(self, num_top: Sequence[int]) -> Iterator[TokenLogprobs]:
        """One value per token; `num_top[i]` says how many of the best the i-th token wants."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (
            copy.wait().tolist() for copy in self._copies
        )
        for i, count in enumerate(num_top):
            yield TokenLogprobs(
                token_id=token_ids[i],
                logprob=logprobs[i],
                rank=ranks[i],
                top_token_ids=top_ids[i][:count],
                top_logprobs=top_logprobs[i][:count],
            )
