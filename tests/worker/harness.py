"""Small stands for the worker's tests: a batch for the sampler, and a model that checks its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from serve.kernels import reference
from serve.kernels.base import ForwardContext
from serve.kernels.sampling import SamplingKernels
from serve.kv_cache.storage import KVStorage
from serve.models.base import LayerCache
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput
from serve.worker.device.cpu_device import CpuDevice
from serve.worker.device.device import Device
from serve.worker.executor import TokenMask
from serve.worker.model_runner import ModelRunner, layer_shapes, make_runner
from serve.worker.request_rows import RequestRows
from serve.worker.sampling.logit_edits import LogitEditor
from serve.worker.sampling.sampler import LogprobsMode, Sampler, SamplerOutput


@dataclass
class Asked:
    """One request as the sampler sees it: its wishes, its tokens so far."""

    sampling: SamplingParams
    prompt: Sequence[int] = (0,)
    generated: Sequence[int] = ()


def cpu() -> CpuDevice:
    return CpuDevice(num_threads=1)


def make_rows(vocab_size: int, *, num_rows: int = 64, max_blocks: int = 8) -> RequestRows:
    return RequestRows(num_rows, max_blocks=max_blocks, vocab_size=vocab_size, device=cpu())


def row_data(request_id: str, asked: Asked, block_ids: Sequence[int] = ()) -> RowData:
    tokens = [*asked.prompt, *asked.generated]
    return RowData(request_id, asked.sampling, tokens, len(asked.prompt), list(block_ids))


class SamplerStand:
    """A sampler with its rows; `sample` gives each request one row of logits."""

    def __init__(
        self,
        vocab_size: int,
        asked: Sequence[Asked],
        logprobs_mode: LogprobsMode = "raw_logprobs",
        kernels: SamplingKernels | None = None,
    ) -> None:
        self.asked = asked
        self.rows = make_rows(vocab_size, num_rows=max(1, len(asked)))
        for number, request in enumerate(asked):
            self.rows.admit(row_data(str(number), request))
        uploads = self.rows_device.uploads(0)
        editor = LogitEditor(
            self.rows.columns, self.rows.counts, self.rows.recent_tokens, uploads, kernels
        )
        self.sampler = Sampler(
            self.rows.columns, editor, self.rows_device, uploads, logprobs_mode, kernels
        )

    rows_device = cpu()

    def sample(self, logits: Tensor, mask: TokenMask | None = None) -> SamplerOutput:
        """One step for all requests, in order; does not touch `logits`."""
        numbers = range(len(self.asked))
        rows = self.rows.rows_of([str(n) for n in numbers])
        positions = np.array([len(a.prompt) + len(a.generated) for a in self.asked])
        return self.sampler.sample(logits.clone(), rows, positions, mask=mask)


def sample(logits: Tensor, asked: Sequence[Asked | SamplingParams]) -> list[int]:
    """Token ids that one step samples from logits [S, vocab]."""
    requests = [a if isinstance(a, Asked) else Asked(a) for a in asked]
    stand = SamplerStand(logits.shape[1], requests)
    token_ids: list[int] = stand.sample(logits).token_ids.tolist()
    return token_ids


def next_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """What HistoryModel finds most likely after these tokens."""
    value = 0
    for position, token in enumerate(token_ids):
        value = (value * 31 + token * (position + 7) + 1) % 9973
    return value % vocab_size


class HistoryModel:
    """A model whose answer is a hash of every token before, read back from the KV cache.

    So a wrong block table, slot, position, copy or order shows up as a wrong token.
    """

    def __init__(self, vocab_size: int = 97) -> None:
        self.vocab_size = vocab_size
        self.max_position = 512
        self.cache_layers = [LayerCache(1, 1), LayerCache(2, 1)]
        self.is_native = False
        self.needs_prompt_lens = False
        self.can_be_recorded = True
        self.prompt_limits: list[tuple[int, bool]] = []
        self.largest_logits = 0
        self.fail_next = False
        self.failure: Exception = RuntimeError("the device caught fire")

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] → [T, 1]: the most likely next token of each."""
        if self.fail_next:
            self.fail_next = False
            raise self.failure
        meta = ctx.attention
        attention = reference.kernels().attention
        for kv, layer in zip(ctx.kv, self.cache_layers, strict=True):
            content = token_ids.float()[:, None, None].expand(-1, layer.num_kv_heads, 1)
            attention.write_kv(content, content, kv, meta.slot_mapping)
        # Lengths as the device has them: a recorded graph keeps the host's from its recording.
        starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        query_lens = [end - start for start, end in pairwise(starts)]
        rows = [row for row, n in enumerate(query_lens) for _ in range(n)]
        answers = []
        for token, row in enumerate(rows):
            offset = token - starts[row]
            length = seq_lens[row] - query_lens[row] + offset + 1
            assert int(ctx.positions[token]) == length - 1
            answers.append(next_token(self._read(ctx, row, length), self.vocab_size))
        answers += [0] * (len(token_ids) - len(rows))  # padding that is nobody's
        return torch.tensor(answers, dtype=torch.float32)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, 1] → [S, vocab]: 5 for the answer, less and less for the ids after it."""
        self.largest_logits = max(self.largest_logits, len(hidden))
        distance = (torch.arange(self.vocab_size) - hidden) % self.vocab_size
        return 5.0 - distance.float() / 10

    def _read(self, ctx: ForwardContext, row: int, length: int) -> list[int]:
        """A request's tokens as the last layer's cache holds them, read slot by slot."""
        kv = ctx.kv[-1]
        block_size = kv.shape[2]
        table = ctx.attention.block_table[row].tolist()
        return [
            int(kv[1, table[p // block_size], p % block_size, -1, 0].item()) for p in range(length)
        ]


class RunnerStand:
    """A runner over HistoryModel; `step` runs entries written as tuples."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 20,
        num_host_blocks: int = 8,
        device: Device | None = None,
        graph_sizes: Sequence[int] = (),
        sampling: SamplingKernels | None = None,
    ) -> None:
        self.model = HistoryModel()
        kernels = reference.kernels()
        self.device = device or cpu()
        self.rows = RequestRows(
            8, max_blocks=16, vocab_size=self.model.vocab_size, device=self.device
        )
        self.storage = KVStorage(
            layer_shapes(self.model, kernels, block_size),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            dtype=torch.float32,
            allocate=self.device.allocate_zeros,
            copy_blocks=kernels.copy_blocks,
            allocate_host=self.device.allocate_host,
        )
        self.runner: ModelRunner = make_runner(
            self.model,
            self.storage,
            self.rows,
            block_size,
            self.device,
            graph_sizes=graph_sizes,
            sampling=sampling,
        )


def share(
    request_id: str,
    start: int,
    token_ids: Sequence[int],
    *,
    num_tokens: int | None = None,
    new_block_ids: Sequence[int] = (),
    num_samples: int = 1,
) -> ScheduledRequest:
    """A request's part of a step; all its tokens are known unless `num_tokens` says more."""
    return ScheduledRequest(
        request_id,
        start,
        len(token_ids) if num_tokens is None else num_tokens,
        list(token_ids),
        list(new_block_ids),
        num_samples,
    )


def plan(scheduled: Sequence[ScheduledRequest], **parts: list) -> SchedulerOutput:  # type: ignore[type-arg]
    """A step's plan; parts left out are empty."""
    empty = {name: [] for name in ("admitted", "released", "swap_out", "swap_in", "copy")}
    return SchedulerOutput(
        scheduled=list(scheduled),
        num_scheduled_tokens=sum(entry.num_tokens for entry in scheduled),
        **{**empty, **parts},
    )
