"""Whether a transformers model computes over the paged cache what it computes by itself.

A model can be wrong without failing: by an attention bias that is not passed on, positions of its
own counting, a state that two requests would share. So at load a few tokens of two requests run in
chunks and decodes over a scrap cache, and their logits are held against the model's own forward.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.base import AttentionBackend, AttentionMetadata, ForwardContext
from serve.models.base import LayerCache
from serve.models.transformers_batched import Batched, UnservableHeads
from serve.models.transformers_one_by_one import OneByOne
from serve.models.transformers_parts import Parts


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a token's logits may be off, as a share of the spread of all."""

    median: float
    most: float


TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-3),
    torch.float16: Tolerance(0.02, 1.0),
    torch.bfloat16: Tolerance(0.08, 1.0),
}
"""What rounding costs the median token: in 134 families with four random layers 4e-7, 0.001 and
0.01 in the middle and 4e-6, 0.01 and 0.04 at most. In 16 bits it also sends a token to another
expert now and then, so single tokens may be far off. A position or a bias that is missing moves
most tokens by a tenth of the spread to all of it."""

_BLOCK_SIZE = 16
_LONG_S = 2.0
_STEPS = (((0, 3), (1, 2)), ((0, 1), (1, 3)), ((1, 1), (0, 2)))
"""(request, tokens) of each step, single tokens first: chunks, a decode beside a chunk, another."""

logger = logging.getLogger(__name__)


class Way(Protocol):
    """One of the ways to run a model's layers over the paged cache."""

    description: str
    attention: AttentionBackend
    cache_layers: list[LayerCache]

    def run(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] → [T, hidden]; writes this step's K/V."""


def probe_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """[6]: the tokens of the request that is compared. Not consecutive, and none of the first few,
    which tend to be special."""
    tokens = [(7 * number * number + 5 * number + 11) % vocab_size for number in range(6)]
    return torch.tensor(tokens, device=device)


def find_way(
    hf_model: Any,
    parts: Parts,
    attention: AttentionBackend,
    max_position: int,
    token_ids: Tensor,
    dtype: torch.dtype,
) -> Way:
    """The first way that gives these tokens the logits of the plain forward. Raises ConfigError
    with what is wrong with each."""
    ways: Sequence[Callable[[], Way]] = (
        lambda: Batched(hf_model, parts.base, attention, max_position),
        lambda: OneByOne(hf_model, parts.base),
    )
    began = time.monotonic()
    reasons = []
    for make_way in ways:
        try:
            way = make_way()
            _compare(way, parts, token_ids, dtype)
        except UnservableHeads:
            raise
        except Exception as error:  # models' code raises every kind
            if _is_lack_of_memory(error):
                raise
            reasons.append(in_one_line(error))
            continue
        if (took := time.monotonic() - began) > _LONG_S:
            logger.info("trying out how this model runs took %.1f s", took)
        return way
    if _sees_later_tokens(hf_model, parts, token_ids, dtype):
        raise ConfigError("its tokens attend to later ones, as an encoder's do (is_decoder?)")
    raise ConfigError("; one request after another, ".join(reasons))


def _sees_later_tokens(hf_model: Any, parts: Parts, token_ids: Tensor, dtype: torch.dtype) -> bool:
    with torch.inference_mode():
        some = hf_model(input_ids=token_ids[None, :3], use_cache=False).logits[0].float()
    return _problem(some, parts.plain_logits[:3], TOLERANCES[dtype]) is not None


def _compare(way: Way, parts: Parts, token_ids: Tensor, dtype: torch.dtype) -> None:
    """Raises ConfigError if request 1, in chunks and beside another, gets other logits."""
    with torch.inference_mode():
        found = parts.head(_run_steps(way, [token_ids.flip(0), token_ids], dtype))
    if problem := _problem(found, parts.plain_logits, TOLERANCES[dtype]):
        raise ConfigError(f"its logits are not those of its own forward ({problem})")


def _problem(found: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    """What is wrong with logits [T, vocab] that should be others."""
    spread = (expected - expected.mean()).square().mean().sqrt().clamp(min=1e-30)
    off = (found - expected).square().mean(dim=-1).sqrt() / spread
    median, most = float(off.median()), float(off.max())
    if median <= tolerance.median and most <= tolerance.most:  # NaN is no less
        return None
    return (
        f"off by {median:.2g} of their spread, at most {most:.2g}; {tolerance.median:g} and "
        f"{tolerance.most:g} are tolerated"
    )


def _run_steps(way: Way, requests: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Hidden states of request 1's tokens."""
    device = requests[0].device
    block_size = (way.attention.limits.block_sizes or (_BLOCK_SIZE,))[0]
    cache = [
        torch.zeros(
            way.attention.kv_shape(3, block_size, *astuple(layer)), dtype=dtype, device=device
        )
        for layer in way.cache_layers
    ]
    done = [0, 0]
    found = []
    for step in _STEPS:
        shares = [(request, done[request], count) for request, count in step]
        token_ids = torch.cat([requests[r][start : start + n] for r, start, n in shares])
        hidden = way.run(token_ids, _context(shares, cache, block_size, device))
        start = 0
        for request, count in step:
            if request == 1:
                found.append(hidden[start : start + count])
            done[request] += count
            start += count
    return torch.cat(found)


def _context(
    shares: Sequence[tuple[int, int, int]],
    cache: Sequence[Tensor],
    block_size: int,
    device: torch.device,
) -> ForwardContext:
    """Of a step with these (request, first position, tokens); request r lives in block 2 - r."""
    query_lens = [count for _, _, count in shares]
    seq_lens = [start + count for _, start, count in shares]
    places = [(r, position) for r, start, n in shares for position in range(start, start + n)]
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    meta = AttentionMetadata(
        query_start_loc=int32([0, *itertools.accumulate(query_lens)]),
        seq_lens=int32(seq_lens),
        block_table=int32([[2 - request] for request, _, _ in shares]),
        slot_mapping=torch.tensor([(2 - r) * block_size + p for r, p in places], device=device),
        num_decode_rows=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    return ForwardContext(cache, meta, torch.tensor([p for _, p in places], device=device))


def _is_lack_of_memory(error: Exception) -> bool:
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or "can't allocate memory" in str(error)


def in_one_line(error: Exception) -> str:
    """The error as a reason; what our own say is one already."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return lines[0] if isinstance(error, ConfigError) else f"{type(error).__name__}: {lines[0]}"
