"""What the sampler asks of a device: see `base`.

What they compute is the sampler's own torch code (`worker/sampling/`); only `draw` and `penalize`
must be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class DrawFn(Protocol):
    def __call__(
        self, logits: Tensor, controls: Tensor, keys: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """One token per row [S] int64, after temperature, min_p, top_k and top_p; in `out`, if
        that is given.

        logits [S, vocab] fp32; controls [S, >= 4] fp32: temperature (0: the most likely token),
        top_k, top_p, min_p; keys [S, 2] int32: what the row's noise is made of.
        """


class PenalizeFn(Protocol):
    def __call__(
        self, logits: Tensor, controls: Tensor, generated: Tensor, in_prompt: Tensor
    ) -> None:
        """Penalize logits [S, vocab] fp32 in place. controls [S, 3] fp32: presence, frequency,
        repetition; generated [S, vocab] int32: times generated; in_prompt [S, vocab] bool."""


class MaskFn(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """In these rows [M] int64 of logits [S, vocab] fp32, each once, put -inf where a token's
        bit is 0. bits [M, ceil(vocab / 32)] int32: token t is bit t % 32 of number t // 32."""


class ArgmaxFn(Protocol):
    def __call__(self, logits: Tensor, out: Tensor) -> Tensor:
        """The most likely token of each row [S] int64, of equals the lowest id, in `out`.

        logits [S, vocab] fp32.
        """


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Scores of L tokens."""

    token_ids: Tensor  # [L] int64
    logprobs: Tensor  # [L] fp32
    ranks: Tensor  # [L] int64, 1 = most likely; equal logits share the better rank
    top_token_ids: Tensor  # [L, n] int64, best first
    top_logprobs: Tensor  # [L, n] fp32


class ScoreFn(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
        """Score tokens [L] by their rows of logits [L, vocab] fp32, and list each row's `num_top`
        best."""


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """What the sampler does in few passes over the vocabulary, with nothing read on the host."""

    draw: DrawFn
    penalize: PenalizeFn
    argmax: ArgmaxFn | None = None  # None, here and below: torch's own is as fast
    score: ScoreFn | None = None
    mask: MaskFn | None = None
