"""InputBuilder: a step's plan and the rows → the tensors of a forward pass.

Everything is computed in host memory with a few array operations and sent in one piece: many small
copies to a device would cost more than the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve.kernels.base import AttentionMetadata
from serve.scheduler.output import ScheduledRequest
from serve.worker.device.device import Uploads
from serve.worker.request_rows import RequestRows
from serve.worker.sampling.drafts import NO_TOKEN, Drafts
from serve.worker.sampling.sampling_columns import Rows


@dataclass(frozen=True, slots=True)
class SampleInput:
    """Which requests get a next token from this step, or several: those stand here repeatedly."""

    request_ids: list[str]  # [S]
    rows: Rows  # [S]
    positions: Rows  # [S]; where the new token will stand in its request
    rows_on_device: Tensor  # [S] int64
    drafts: Drafts | None  # None: each request once


@dataclass(frozen=True, slots=True)
class PromptScoreInput:
    """A run of the step's tokens whose successors in the prompt are to be scored."""

    request_id: str
    first_token: int  # index among the step's T
    next_token_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's tensors: T tokens of R requests, those with a single token first."""

    numbers: Tensor  # [3, T] int64: the two below, and the slots
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    prompt_lens: Tensor  # [T] int64
    attention: AttentionMetadata
    logits_indices: Tensor  # [S] int64; the tokens behind which one is sampled
    num_single_samples: int  # how many of these are requests with a single token
    sample: SampleInput | None
    prompt_scores: list[PromptScoreInput]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which of the step's tokens belong to whom, in host memory: R requests in batch order."""

    entries: list[ScheduledRequest]  # those with a single token first
    rows: Rows
    query_lens: Rows
    seq_lens: Rows
    ends: Rows  # just past each request's last token


class InputBuilder:
    """Reads the rows and changes nothing."""

    def __init__(self, rows: RequestRows, block_size: int, uploads: Uploads) -> None:
        self._rows = rows
        self._block_size = block_size
        self._uploads = uploads
        self._newest = torch.empty_like(rows.last_token)  # gathered for one step

    def build(self, scheduled: Sequence[ScheduledRequest]) -> ModelInput:
        """The tensors for these shares of a step, which must not be none."""
        layout = self._lay_out(scheduled)
        rows, seq_lens, ends = layout.rows, layout.seq_lens, layout.ends
        if ends[-1] == len(rows):  # a token each, as in most steps
            positions, token_rows = seq_lens - 1, rows
        else:
            positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, layout.query_lens)
            token_rows = np.repeat(rows, layout.query_lens)
        known, in_flight = _token_ids(layout.entries)
        sampling, lasts, sample_positions, drafts = self._sampled(layout)
        query_lens_host, seq_lens_host = layout.query_lens.tolist(), seq_lens.tolist()
        max_seq_len = max(seq_lens_host)
        num_columns = -(-max_seq_len // self._block_size)

        (
            numbers,
            prompt_lens,
            last_tokens,
            sample_rows,
            unknown,
            unknown_rows,
            query_start_loc,
            sent_seq_lens,
            block_table,
        ) = self._uploads.send(
            _in_rows(known, positions, self._slots(token_rows, positions)),
            self._rows.columns.num_prompt_tokens[token_rows],
            lasts,
            rows[sampling],
            in_flight,
            token_rows[in_flight],
            np.concatenate(([0], ends), dtype=np.int32),
            seq_lens.astype(np.int32),
            self._rows.block_table[rows, :num_columns],
        )
        numbers = numbers[:, : len(known)]
        token_ids, sent_positions, slots = numbers
        num_singles = query_lens_host.count(1)
        if in_flight.size:
            # Tokens the host does not know yet, from where the step before leaves them.
            newest = self._newest[: in_flight.size]
            torch.index_select(self._rows.last_token, 0, unknown_rows, out=newest)
            token_ids.index_copy_(0, unknown, newest)
        return ModelInput(
            numbers=numbers,
            token_ids=token_ids,
            positions=sent_positions,
            prompt_lens=prompt_lens,
            attention=AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=sent_seq_lens,
                block_table=block_table,
                slot_mapping=slots,
                num_decode_rows=num_singles,
                max_query_len=max(query_lens_host),
                max_seq_len=max_seq_len,
                query_lens_host=query_lens_host,
                seq_lens_host=seq_lens_host,
            ),
            logits_indices=last_tokens,
            num_single_samples=int(np.searchsorted(sampling, num_singles)),
            sample=SampleInput(
                request_ids=[layout.entries[i].request_id for i in sampling.tolist()],
                rows=rows[sampling],
                positions=sample_positions,
                rows_on_device=sample_rows,
                drafts=drafts,
            )
            if sampling.size
            else None,
            prompt_scores=self._prompt_scores(layout),
        )

    def _lay_out(self, scheduled: Sequence[ScheduledRequest]) -> _Layout:
        entries = sorted(scheduled, key=lambda entry: entry.num_tokens != 1)
        count = len(entries)
        starts = np.fromiter((e.start for e in entries), np.int64, count)
        query_lens = np.fromiter((e.num_tokens for e in entries), np.int64, count)
        return _Layout(
            entries=entries,
            rows=self._rows.rows_of([e.request_id for e in entries]),
            query_lens=query_lens,
            seq_lens=starts + query_lens,
            ends=query_lens.cumsum(),
        )

    def _sampled(self, layout: _Layout) -> tuple[Rows, Rows, Rows, Drafts | None]:
        """Of each position to sample [S]: its request, the token before it, its place there."""
        num_samples = [entry.num_samples for entry in layout.entries]
        sampling = np.flatnonzero(num_samples)
        lasts, positions = layout.ends[sampling] - 1, layout.seq_lens[sampling]
        if sum(num_samples) == len(sampling):
            return sampling, lasts, positions, None
        counts = np.array(num_samples)[sampling]
        next_ids = []
        for index in sampling.tolist():
            entry = layout.entries[index]
            assert entry.num_samples == 1 or len(entry.token_ids) == entry.num_tokens, entry
            next_ids += [*entry.token_ids[entry.num_tokens - entry.num_samples + 1 :], NO_TOKEN]
        offsets = np.arange(len(next_ids)) - np.repeat(counts.cumsum() - 1, counts)  # -2, -1, 0
        drafts = Drafts(counts, np.array(next_ids), self._uploads)
        sampling, lasts, positions = (np.repeat(x, counts) for x in (sampling, lasts, positions))
        return sampling, lasts + offsets, positions + offsets, drafts

    def _slots(self, rows: Rows, positions: Rows) -> Rows:
        """[T] rows and positions → where each token's K/V goes."""
        blocks, offsets = np.divmod(positions, self._block_size)
        return self._rows.block_table[rows, blocks] * np.int64(self._block_size) + offsets

    def _prompt_scores(self, layout: _Layout) -> list[PromptScoreInput]:
        prompts, found = self._rows.prompts_to_score, []
        for number, entry in enumerate(layout.entries if prompts else ()):
            # A token's logits score the one after it, so position 0 is never scored.
            first, last = entry.start + 1, entry.start + entry.num_tokens + 1
            if successors := prompts.get(entry.request_id, [])[first:last]:
                params = self._rows.columns.params[layout.rows[number]]
                found.append(
                    PromptScoreInput(
                        request_id=entry.request_id,
                        first_token=int(layout.ends[number]) - entry.num_tokens,
                        next_token_ids=successors,
                        num_top=params.prompt_logprobs or 0,
                    )
                )
        return found


def _in_rows(*arrays: Rows) -> Rows:
    """As rows of one array, which is sent and taken over in one piece; of even length, so that
    each row begins where kernels expect it."""
    length = len(arrays[0])
    rows = np.zeros((len(arrays), length + length % 2), dtype=np.int64)
    for row, array in zip(rows, arrays, strict=True):
        row[:length] = array
    return rows


def _token_ids(entries: Sequence[ScheduledRequest]) -> tuple[Rows, Rows]:
    """The step's token ids, and which of them are not known yet (0 there)."""
    token_ids: list[int] = []
    in_flight = []
    for entry in entries:
        token_ids += entry.token_ids
        if len(entry.token_ids) < entry.num_tokens:
            in_flight.append(len(token_ids))
            token_ids.append(0)
    return np.array(token_ids, dtype=np.int64), np.array(in_flight, dtype=np.int64)
