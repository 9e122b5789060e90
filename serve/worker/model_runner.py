"""ModelRunner: carries out one step's plan on the device.

The order within a step is fixed (release, swap out, swap in, copy, admit, run) and all of it is one
queue of device work, so that freed blocks and rows may be handed out again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from serve.errors import OutOfMemory
from serve.kernels.base import ForwardContext, Kernels
from serve.kernels.sampling import LogprobTensors, SamplingKernels
from serve.kv_cache.storage import KVStorage, LayerShape, Tier
from serve.models.base import CausalModel
from serve.scheduler.output import SchedulerOutput
from serve.worker.device.device import Device, Uploads
from serve.worker.executor import TokenMask
from serve.worker.graphs import StepGraphs
from serve.worker.input_builder import InputBuilder, ModelInput, PromptScoreInput, SampleInput
from serve.worker.pending_step import PendingMask, PendingPrompt, PendingStep
from serve.worker.request_rows import RequestRows
from serve.worker.sampling.logit_edits import LogitEditor
from serve.worker.sampling.logprobs import PendingLogprobs, concatenate
from serve.worker.sampling.sampler import LogprobsMode, Sampler
from serve.worker.sampling.token_mask import placed_in_batch

_SCORE_ELEMENTS = 2**23
"""Most logits held at once while scoring prompts: 32 MiB, however long the prompt."""

_BYTES_PER_ROW = 256  # ids, positions, slots, lengths, sampling wishes and their keys
_BYTES_FOR_PROMPTS = 2**20  # of 32,000 tokens


Result = TypeVar("Result")


@dataclass(slots=True)
class StepLaunch:
    """A step whose forward pass is launched."""

    runner: ModelRunner
    plan: SchedulerOutput
    prompts: list[PendingPrompt]
    wanted: SampleInput | None = None
    logits: Tensor | None = None  # [S, vocab], until they are sampled from

    def sample(self, mask: TokenMask | None) -> PendingStep:
        """Launch the choice of its tokens; once, and before the next step's forward pass."""
        return self.runner.sample(self, mask)


class ModelRunner:
    """Owns the rows and runs the model over the KV storage."""

    def __init__(
        self,
        model: CausalModel,
        storage: KVStorage,
        rows: RequestRows,
        builder: InputBuilder,
        sampler: Sampler,
        device: Device,
        uploads: Uploads,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._storage = storage
        self._rows = rows
        self._builder = builder
        self._sampler = sampler
        self._device = device
        self._uploads = uploads
        self._graphs = graphs
        self._inference = torch.inference_mode()  # made once: it costs as much as a small operation

    def execute(self, plan: SchedulerOutput) -> PendingStep:
        """Launch a whole step."""
        return self.forward(plan).sample(None)

    def forward(self, plan: SchedulerOutput) -> StepLaunch:
        """Launch a step's forward pass. If this or `sample` raises, its requests have no rows any
        more, and steps that were planned before that was known run without them."""
        self._rows.release(plan.released)
        self._uploads.begin()
        return self._guarded(plan, partial(self._forward, plan))

    def sample(self, launch: StepLaunch, mask: TokenMask | None) -> PendingStep:
        """Launch the choice of a step's tokens, those that a mask allows."""
        if launch.wanted is None:
            return PendingStep(launch.prompts)
        return self._guarded(launch.plan, partial(self._sample, launch, mask))

    def _guarded(self, plan: SchedulerOutput, work: Callable[[], Result]) -> Result:
        try:
            with self._inference:
                return work()
        except torch.OutOfMemoryError:
            self._lose(plan)
        except Exception:
            self._lose(plan)
            raise
        # Raised out here, because torch's error keeps the step's tensors alive as long as it lives.
        error = OutOfMemory(
            f"no memory for a step of {plan.num_scheduled_tokens} tokens of {len(plan.scheduled)} "
            f"requests on {self._device.describe()}. Lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs."
        )
        self._device.release_unused()
        raise error

    def _forward(self, plan: SchedulerOutput) -> StepLaunch:
        if plan.swap_out or plan.swap_in or plan.copy:
            self._copy_blocks(plan)
        for request in plan.admitted:
            self._rows.admit(request)
        scheduled = [e for e in plan.scheduled if not self._rows.is_lost(e.request_id)]
        for entry in scheduled:
            if entry.new_block_ids:
                self._rows.append_blocks(entry.request_id, entry.new_block_ids)
        if not scheduled:
            return StepLaunch(self, plan, [])
        step = self._builder.build(scheduled)
        logits = self._graphs.logits(step) if self._graphs is not None else None
        if logits is None:
            return self._run_model(plan, step)
        if step.sample is None:
            return StepLaunch(self, plan, [])
        return StepLaunch(self, plan, [], step.sample, logits)

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        self._storage.copy(plan.swap_out, src=Tier.DEVICE, dst=Tier.HOST)
        self._storage.copy(plan.swap_in, src=Tier.HOST, dst=Tier.DEVICE)
        self._storage.copy(plan.copy, src=Tier.DEVICE, dst=Tier.DEVICE)

    def _lose(self, plan: SchedulerOutput) -> None:
        self._rows.lose(entry.request_id for entry in plan.scheduled)

    def _run_model(self, plan: SchedulerOutput, step: ModelInput) -> StepLaunch:
        storage = self._storage
        # In a decode step the tokens to sample from are all there are.
        wants_all = bool(step.prompt_scores) or len(step.logits_indices) == len(step.token_ids)
        context = ForwardContext(
            *(storage.layers, step.attention, step.positions, step.prompt_lens, storage.scales),
            logits_indices=None if wants_all else step.logits_indices,
        )
        hidden = self._model.forward(step.token_ids, context)
        prompts = [self._score_prompt(hidden, wanted) for wanted in step.prompt_scores]
        if step.sample is None:
            return StepLaunch(self, plan, prompts)
        if len(step.logits_indices) < len(hidden):
            hidden = hidden[step.logits_indices]
        return StepLaunch(self, plan, prompts, step.sample, self._model.logits(hidden))

    def _sample(self, launch: StepLaunch, mask: TokenMask | None) -> PendingStep:
        wanted, logits = launch.wanted, launch.logits
        launch.logits = None
        assert wanted is not None
        assert logits is not None, "sampled twice"
        if mask is not None:
            mask = placed_in_batch(mask, launch.plan, wanted.request_ids)
        rows = wanted.rows
        sampled = self._sampler.sample(logits, rows, wanted.positions, wanted.drafts, mask)
        if wanted.drafts is None:
            self._rows.record(rows, wanted.rows_on_device, sampled.token_ids)
        else:
            self._rows.record_accepted(rows, sampled.token_ids, wanted.drafts)
        step = PendingStep(
            launch.prompts,
            wanted.request_ids,
            self._device.to_host(sampled.token_ids),
            wanted.drafts,
        )
        if sampled.logprobs is not None:
            params = self._rows.columns.params
            step.logprobs = PendingLogprobs(sampled.logprobs, self._device)
            step.logprob_places = sampled.logprob_places
            step.num_logprobs = [params[rows[i]].logprobs or 0 for i in sampled.logprob_places]
        if mask is not None and sampled.excluded is not None:
            excluded = self._device.to_host(sampled.excluded)
            step.mask = PendingMask(mask.rows.tolist(), excluded)
        return step

    def _score_prompt(self, hidden: Tensor, wanted: PromptScoreInput) -> PendingPrompt:
        """Score prompt tokens in slices, so that a long prompt's logits never exist together."""
        count = len(wanted.next_token_ids)
        next_tokens = self._device.to_device(torch.tensor(wanted.next_token_ids))
        size = max(1, _SCORE_ELEMENTS // self._model.vocab_size)
        parts: list[LogprobTensors] = []
        for first in range(0, count, size):
            last = min(first + size, count)
            at = wanted.first_token
            logits = self._model.logits(hidden[at + first : at + last])
            parts.append(self._sampler.score(logits, next_tokens[first:last], wanted.num_top))
        scores = PendingLogprobs(concatenate(parts), self._device)
        return PendingPrompt(wanted.request_id, scores, [wanted.num_top] * count)


def make_runner(
    model: CausalModel,
    storage: KVStorage,
    rows: RequestRows,
    block_size: int,
    device: Device,
    *,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    graph_sizes: Sequence[int] = (),
    sampling: SamplingKernels | None = None,
) -> ModelRunner:
    """Put a runner together over a model, its cache and its rows.

    Records the model for steps of these batch sizes, on a device that can record.
    """
    uploads = device.uploads(_upload_bytes(rows))
    editor = LogitEditor(rows.columns, rows.counts, rows.recent_tokens, uploads, sampling)
    sampler = Sampler(rows.columns, editor, device, uploads, logprobs_mode, sampling)
    builder = InputBuilder(rows, block_size, uploads)
    recorder = device.graph_recorder() if graph_sizes else None
    graphs = None
    if recorder is not None:
        max_blocks = rows.block_table.shape[1]
        graphs = StepGraphs(
            model,
            storage.layers,
            recorder,
            graph_sizes,
            max_blocks=max_blocks,
            block_size=block_size,
            kv_scales=storage.scales,
        )
    return ModelRunner(model, storage, rows, builder, sampler, device, uploads, graphs)


def _upload_bytes(rows: RequestRows) -> int:
    """Enough for a token of every row with its block table and wishes, and for long prompts."""
    num_rows, max_blocks = rows.block_table.shape
    return num_rows * (4 * max_blocks + _BYTES_PER_ROW) + _BYTES_FOR_PROMPTS


def layer_shapes(model: CausalModel, kernels: Kernels, block_size: int) -> list[LayerShape]:
    """For each attention layer, the shape of its cache by number of blocks."""
    return [
        partial(
            kernels.attention.kv_shape,
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
        )
        for layer in model.cache_layers
    ]
