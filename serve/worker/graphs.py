"""StepGraphs: steps of few tokens, recorded once per size and replayed.

A step is hundreds of small kernels whose launches take Python longer than the GPU takes to run
them, if its tokens are few. A CUDA graph launches them all at once, but with the shapes and
addresses it was recorded with: so a step is padded to a recorded size and copied into fixed
tensors. Padding requests have one token, at position 0 of the null block; padding tokens of prompts
belong to nobody, and their keys and values go to the null block, too. A recording ends with the
logits of the requests that may be sampled, so that nothing of a replayed step allocates memory.

Most steps have single tokens only, and a size for every 8 of them. For steps with prompts there are
a few sizes, of up to 256 prompt tokens: launching 32 layers of an 8B model kernel by kernel takes
the host 3 ms at best (benchmarks/host_step.py) and 5 beside other work, while the GPU needs 4.5 ms
for up to some 150 tokens, whose time is that of reading the weights, and 14 ms for 512.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from serve.kernels.base import AttentionMetadata, ForwardContext
from serve.models.base import CausalModel
from serve.progress import StartBar
from serve.worker.device.device import CapturedWork, GraphRecorder
from serve.worker.input_builder import ModelInput

logger = logging.getLogger(__name__)

_GIB = 2**30
_EVERY = 8

_SINGLES_BESIDE_PROMPTS = (8, 32, 128)  # and as many as there can be
_PROMPT_TOKENS = (64, 256)
_PROMPTS = 4
_FREE_TOKENS = 160
"""Tokens of a step whose number hardly matters, since the weights have to be read for any."""
_MOST_PADDING = 2
"""Times a larger step's tokens that a recording may compute."""


def capture_sizes(wanted: Sequence[int], max_num_seqs: int) -> list[int]:
    """Batch sizes to record, ascending: those asked for, or 1, 2, 4 and every 8th; no step is
    larger than `max_num_seqs`, which is itself recorded when nothing was asked."""
    sizes = wanted or (1, 2, 4, *range(_EVERY, max_num_seqs, _EVERY), max_num_seqs)
    return sorted({size for size in sizes if size <= max_num_seqs})


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a recording has room for."""

    singles: int  # requests with one token, which come first
    prompts: int = 0  # requests with more
    prompt_tokens: int = 0  # of these together

    @property
    def num_requests(self) -> int:
        return self.singles + self.prompts

    @property
    def num_tokens(self) -> int:
        return self.singles + self.prompt_tokens


def mixed_sizes(singles: Sequence[int]) -> list[GraphSize]:
    """For steps with prompts, by ascending tokens. `singles`: the sizes without."""
    most = singles[-1]
    beside = {min(number, most) for number in (*_SINGLES_BESIDE_PROMPTS, most)}
    sizes = [GraphSize(number, _PROMPTS, t) for number in beside for t in _PROMPT_TOKENS]
    return sorted(sizes, key=lambda size: size.num_tokens)


class _FixedInputs:
    """The inputs of every graph, for the largest step; a smaller one uses the first places."""

    def __init__(self, sizes: Sequence[GraphSize], max_blocks: int, device: torch.device) -> None:
        requests = max(size.num_requests for size in sizes)
        tokens = max(size.num_tokens for size in sizes)
        zeros = partial(torch.zeros, device=device)
        # Token ids, positions and slots. Rows start where kernels expect it: every 16 bytes.
        self.numbers = zeros((3, tokens + tokens % 2), dtype=torch.int64)
        self.seq_lens = torch.ones(requests, dtype=torch.int32, device=device)
        self.block_table = zeros((requests, max_blocks), dtype=torch.int32)
        self.sampled = zeros(requests, dtype=torch.int64)  # tokens, in steps with prompts
        self._starts = {
            size: torch.arange(size.num_requests + 1, dtype=torch.int32, device=device)
            for size in sizes
        }

    def fill(self, step: ModelInput, size: GraphSize) -> None:
        """Take in a step's requests; what is left of `size` becomes padding.

        A row's blocks past its length may be an earlier step's: nothing of them is read.
        """
        meta, numbers = step.attention, step.numbers
        singles, first = meta.num_decode_rows, size.singles
        self.numbers[:, :singles] = numbers[:, :singles]
        self.seq_lens[:singles] = meta.seq_lens[:singles]
        if singles < first:
            self.numbers[:, singles:first] = 0
            self.seq_lens[singles:first] = 1
        columns = meta.block_table.shape[1]
        self.block_table[:singles, :columns] = meta.block_table[:singles]
        if size.prompts:
            self._fill_prompts(step, size)

    def _fill_prompts(self, step: ModelInput, size: GraphSize) -> None:
        meta, numbers = step.attention, step.numbers
        singles, first = meta.num_decode_rows, size.singles
        count, columns = meta.block_table.shape
        tokens, end = numbers.shape[1], first + numbers.shape[1] - singles
        self.numbers[:, first:end] = numbers[:, singles:tokens]
        self.numbers[:, end : size.num_tokens] = 0
        rows = slice(first, first + count - singles)
        self.seq_lens[rows] = meta.seq_lens[singles:]
        self.block_table[rows, :columns] = meta.block_table[singles:]
        moved = first - singles
        starts = self._starts[size]
        torch.add(meta.query_start_loc[singles + 1 :], moved, out=starts[first + 1 : rows.stop + 1])
        starts[rows.stop + 1 :] = end  # requests without a token
        sampled, ours = step.logits_indices, step.num_single_samples
        self.sampled[:ours] = sampled[:ours]
        torch.add(sampled[ours:], moved, out=self.sampled[ours : len(sampled)])
        self.sampled[len(sampled) : size.num_requests] = 0

    def attention(self, size: GraphSize, max_seq_len: int) -> AttentionMetadata:
        """What the kernels are told while a graph of this size is recorded. Nothing that varies
        from step to step may be read on the host, so the host's numbers are upper bounds."""
        rows = size.num_requests
        query_lens = [1] * size.singles + [size.prompt_tokens] * size.prompts
        return AttentionMetadata(
            query_start_loc=self._starts[size],
            seq_lens=self.seq_lens[:rows],
            block_table=self.block_table[:rows],
            slot_mapping=self.numbers[2, : size.num_tokens],
            num_decode_rows=size.singles,
            max_query_len=max(query_lens),
            max_seq_len=max_seq_len,
            query_lens_host=query_lens,
            seq_lens_host=[max_seq_len] * rows,
        )


class StepGraphs:
    """Recorded forward passes over one model and cache. Used only by ModelRunner."""

    def __init__(
        self,
        model: CausalModel,
        kv: Sequence[Tensor],
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_blocks: int,
        block_size: int,
        kv_scales: Sequence[Tensor] | None = None,
    ) -> None:
        """Record a graph for each of `sizes` (single tokens, ascending, at least one), and some for
        prompts beside them. `max_blocks`: longest block table of one request."""
        self._model = model
        self._kv = kv
        self._kv_scales = kv_scales
        self._recorder = recorder
        self._singles = list(sizes)
        self._mixed = mixed_sizes(sizes)
        self._max_seq_len = max_blocks * block_size
        self._graphs: dict[GraphSize, CapturedWork] = {}
        self._record(max_blocks)

    def logits(self, step: ModelInput) -> Tensor | None:
        """Logits [S, vocab] fp32 of a step's samples, valid until the next step; they may be
        changed. None if the step has no graph."""
        size = None if step.prompt_scores else self._size_for(step.attention)
        if size is None or len(step.logits_indices) > size.num_requests:
            return None  # with drafts there may be more samples than requests
        self._inputs.fill(step, size)
        self._graphs[size].replay()
        count = len(step.logits_indices)
        if size.prompts or count == len(step.attention.query_lens_host):
            return self._logits[:count]
        return self._logits[step.logits_indices]

    def _size_for(self, meta: AttentionMetadata) -> GraphSize | None:
        count, singles = len(meta.query_lens_host), meta.num_decode_rows
        if count == singles:
            place = bisect_left(self._singles, singles)
            return GraphSize(self._singles[place]) if place < len(self._singles) else None
        if count - singles > _PROMPTS:
            return None
        tokens = sum(meta.query_lens_host)
        most = max(_FREE_TOKENS, _MOST_PADDING * tokens)
        return next(
            (
                size
                for size in self._mixed
                if singles <= size.singles
                and tokens - singles <= size.prompt_tokens
                and size.num_tokens <= most
            ),
            None,
        )

    @torch.inference_mode()
    def _record(self, max_blocks: int) -> None:
        started, free = time.monotonic(), self._recorder.free_bytes()
        device = self._kv[0].device
        sizes = sorted(self._all_sizes(), key=lambda size: size.num_tokens)
        self._inputs = _FixedInputs(sizes, max_blocks, device)
        # One for all graphs: each would otherwise keep logits of its own.
        requests = max(size.num_requests for size in sizes)
        self._logits = torch.zeros((requests, self._model.vocab_size), device=device)
        with StartBar("recording CUDA graphs", len(sizes)) as bar:
            # Largest first: the smaller graphs find room in the memory it has used.
            for size in sizes[::-1]:
                self._graphs[size], _ = self._recorder.capture(partial(self._run, size))
                bar.advance()
        logger.info(
            "recorded CUDA graphs for %d batch sizes up to %d, and %d with prompts: "
            "%.1f s, %.2f GiB",
            len(self._singles),
            self._singles[-1],
            len(self._mixed),
            time.monotonic() - started,
            (free - self._recorder.free_bytes()) / _GIB,
        )

    def _all_sizes(self) -> Iterator[GraphSize]:
        yield from map(GraphSize, self._singles)
        yield from self._mixed

    def _run(self, size: GraphSize) -> Tensor:
        inputs, tokens, rows = self._inputs, size.num_tokens, size.num_requests
        sampled = inputs.sampled[:rows] if size.prompts else None
        context = ForwardContext(
            self._kv,
            inputs.attention(size, self._max_seq_len),
            inputs.numbers[1, :tokens],
            kv_scales=self._kv_scales,
            logits_indices=sampled,
        )
        hidden = self._model.forward(inputs.numbers[0, :tokens], context)
        if sampled is not None and len(hidden) == tokens:  # a model may give all of them
            hidden = hidden[sampled]
        return self._logits[:rows].copy_(self._model.logits(hidden))
