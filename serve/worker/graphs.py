"""DecodeGraphs: steps of single tokens, recorded once per batch size and replayed.

A decode step is hundreds of small kernels whose launches take Python longer than the GPU takes to
run them. A CUDA graph launches them all at once, but with the shapes and addresses it was recorded
with: so a step is padded to the next recorded size and copied into fixed tensors. Padding requests
have one token, at position 0 of the null block. A recording ends with the logits of every request,
so that nothing of a replayed step allocates memory.

Steps with prompts run kernel by kernel, without pieces of them being recorded. Their launches are
hidden already: the host launches some 10 kernels a layer, at about 5 us each 1.6 ms for 32 layers,
while the GPU computes 2 * 8e9 * T flops for T tokens of an 8B model, 5 ms for 128 tokens at 400
TFLOP/s and 80 ms for 2048. Only a step with a few tens of prompt tokens could gain, and it would
take one graph per layer and token count, with attention launched in between.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

from serve.kernels.base import AttentionMetadata, ForwardContext
from serve.models.base import CausalModel
from serve.worker.device.device import CapturedWork, GraphRecorder
from serve.worker.input_builder import ModelInput

logger = logging.getLogger(__name__)

_GIB = 2**30
_EVERY = 8


def capture_sizes(wanted: Sequence[int], max_num_seqs: int) -> list[int]:
    """Batch sizes to record, ascending: those asked for, or 1, 2, 4 and every 8th; no step is
    larger than `max_num_seqs`, which is itself recorded when nothing was asked."""
    sizes = wanted or (1, 2, 4, *range(_EVERY, max_num_seqs, _EVERY), max_num_seqs)
    return sorted({size for size in sizes if size <= max_num_seqs})


class _FixedInputs:
    """The inputs of every graph, for the largest batch; a smaller one uses the first rows."""

    def __init__(self, batch: int, max_blocks: int, device: torch.device) -> None:
        zeros = torch.zeros
        self.token_ids = zeros(batch, dtype=torch.int64, device=device)
        self.positions = zeros(batch, dtype=torch.int64, device=device)
        self.slots = zeros(batch, dtype=torch.int64, device=device)
        self.seq_lens = torch.ones(batch, dtype=torch.int32, device=device)
        self.block_table = zeros((batch, max_blocks), dtype=torch.int32, device=device)
        self.query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def fill(self, step: ModelInput, size: int) -> None:
        """Take in a step's requests; those after them, up to `size`, become padding."""
        meta = step.attention
        count, columns = meta.block_table.shape
        for fixed, given, padding in (
            (self.token_ids, step.token_ids, 0),
            (self.positions, step.positions, 0),
            (self.slots, meta.slot_mapping, 0),
            (self.seq_lens, meta.seq_lens, 1),
        ):
            fixed[:count] = given
            if count < size:
                fixed[count:size] = padding
        self.block_table[:size] = 0
        self.block_table[:count, :columns] = meta.block_table

    def attention(self, size: int, max_seq_len: int) -> AttentionMetadata:
        """What the kernels are told while a graph of this size is recorded. Nothing that varies
        from step to step may be read on the host, so the host's numbers are upper bounds."""
        return AttentionMetadata(
            query_start_loc=self.query_start_loc[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.block_table[:size],
            slot_mapping=self.slots[:size],
            num_decode_rows=size,
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_lens_host=[1] * size,
            seq_lens_host=[max_seq_len] * size,
        )


class DecodeGraphs:
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
        """Record a graph for each of `sizes` (ascending, at least one). `max_blocks`: longest block
        table of one request."""
        self._model = model
        self._kv = kv
        self._kv_scales = kv_scales
        self._recorder = recorder
        self._sizes = list(sizes)
        self._max_seq_len = max_blocks * block_size
        self._graphs: dict[int, CapturedWork] = {}
        self._record(max_blocks)

    def logits(self, step: ModelInput) -> Tensor | None:
        """Logits [R, vocab] fp32 of a step's requests, valid until the next step; they may be
        changed. None if the step has no graph."""
        meta = step.attention
        count = len(meta.query_lens_host)
        if meta.max_query_len != 1 or count > self._sizes[-1] or step.prompt_scores:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs.fill(step, size)
        self._graphs[size].replay()
        return self._logits[:count]

    @torch.inference_mode()
    def _record(self, max_blocks: int) -> None:
        started, free = time.monotonic(), self._recorder.free_bytes()
        device = self._kv[0].device
        largest = self._sizes[-1]
        self._inputs = _FixedInputs(largest, max_blocks, device)
        # One for all graphs: each would otherwise keep logits of its own.
        self._logits = torch.zeros((largest, self._model.vocab_size), device=device)
        with _progress() as bar:
            # Largest first: the smaller graphs find room in the memory it has used.
            for size in bar.track(self._sizes[::-1], description="recording CUDA graphs"):
                self._graphs[size], _ = self._recorder.capture(partial(self._run, size))
        logger.info(
            "recorded CUDA graphs for %d batch sizes up to %d: %.1f s, %.2f GiB",
            len(self._sizes),
            self._sizes[-1],
            time.monotonic() - started,
            (free - self._recorder.free_bytes()) / _GIB,
        )

    def _run(self, size: int) -> Tensor:
        inputs = self._inputs
        attention = inputs.attention(size, self._max_seq_len)
        context = ForwardContext(
            self._kv, attention, inputs.positions[:size], kv_scales=self._kv_scales
        )
        hidden = self._model.forward(inputs.token_ids[:size], context)
        return self._logits[:size].copy_(self._model.logits(hidden))


def _progress() -> Progress:
    """A bar on a terminal, nothing elsewhere: the log line at the end is enough for a file."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
