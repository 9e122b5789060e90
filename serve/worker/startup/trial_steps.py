"""Steps that are run at start to learn from them, and whose tokens nobody gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from serve.kv_cache.block_copy import BlockCopy
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.worker.executor import TokenMask, words_for

_MEASURED_TOKENS = 256


def measuring_plan(vocab_size: int, max_position: int, block_size: int) -> SchedulerOutput:
    """One prompt of tokens from all over the vocabulary, in the blocks from 1 on."""
    count = min(_MEASURED_TOKENS, max_position)
    tokens = [number * vocab_size // count for number in range(count)]
    blocks = list(range(1, -(-count // block_size) + 1))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    share = ScheduledRequest("measured", 0, count, tokens, [], num_samples=0)
    row = RowData("measured", sampling, tokens, count, blocks)
    return SchedulerOutput([share], [row], [], [], [], [], count)


def largest_plan(
    budget: int, *, max_num_seqs: int, max_model_len: int, block_size: int
) -> SchedulerOutput:
    """A step that fills the token budget, samples for as many requests as may run, with every
    extra that costs memory, and keeps all K/V in the null block."""
    lengths = _split(budget, max_num_seqs, max_model_len)
    sampling = SamplingParams(
        seed=0, top_p=0.99, min_p=0.01, presence_penalty=0.1, logprobs=20, max_tokens=1
    )
    scheduled, admitted = [], []
    for number, length in enumerate(lengths):
        request_id, tokens = f"largest-{number}", [0] * length
        blocks = [0] * -(-length // block_size)
        admitted.append(RowData(request_id, sampling, tokens, length, blocks))
        scheduled.append(ScheduledRequest(request_id, 0, length, tokens, [], num_samples=1))
    return SchedulerOutput(scheduled, admitted, [], [], [], [], sum(lengths))


def warming_plans(max_model_len: int, block_size: int) -> Iterator[SchedulerOutput]:
    """Steps that launch every kernel that serving launches, in the null block: a prompt, then the
    last token of the longest request, with penalties and a random draw; and a copied block."""
    everything = SamplingParams(
        temperature=1.0, top_k=5, top_p=0.9, presence_penalty=0.1, max_tokens=1, seed=0
    )
    blocks = [0] * -(-max_model_len // block_size)
    released: list[str] = []
    for length, new in ((min(2, max_model_len), 2), (max_model_len, 1)):
        name, count = f"warming-{new}", min(new, length)
        row = RowData(name, everything, [0] * length, length, blocks)
        share = ScheduledRequest(name, length - count, count, [0] * count, [], num_samples=1)
        yield SchedulerOutput([share], [row], released, [], [], [BlockCopy(0, 0)], count)
        released = [name]
    yield SchedulerOutput([], [], released, [], [], [], 0)


def open_mask(plan: SchedulerOutput, vocab_size: int) -> TokenMask | None:
    """A mask of all that a step samples which allows everything; None where it samples nothing."""
    num_samples = sum(entry.num_samples for entry in plan.scheduled)
    if not num_samples:
        return None
    bits = np.full((num_samples, words_for(vocab_size)), -1, dtype=np.int32)
    return TokenMask(np.arange(num_samples, dtype=np.int64), bits)


def _split(budget: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Request lengths that add up to the budget if they can: a few long ones, the others 1."""
    left = budget - min(budget, max_num_seqs)  # each request has a first token already
    lengths = []
    for _ in range(min(budget, max_num_seqs)):
        more = min(left, max_model_len - 1)
        lengths.append(1 + more)
        left -= more
    return lengths
