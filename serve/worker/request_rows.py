"""RequestRows: the worker's state of each running request, in fixed rows.

A request keeps its row from admission to release; preemption releases it. The block tables and
sampling columns live in host memory, where step inputs are gathered from them; the last sampled
token lives on the device, where the next step can read it before the host knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from serve.scheduler.output import RowData
from serve.worker.device.device import Device
from serve.worker.sampling.drafts import Drafts
from serve.worker.sampling.listed_tokens import longest_start
from serve.worker.sampling.sampling_columns import Rows, SamplingColumns, Wish
from serve.worker.sampling.token_memory import RecentTokens, TokenCounts

_REMEMBERED = int(Wish.PENALTIES | Wish.BAD_WORDS)


class RequestRows:
    """Changed only by ModelRunner. Block ids past a row's table are 0, the null block."""

    def __init__(self, num_rows: int, *, max_blocks: int, vocab_size: int, device: Device) -> None:
        """`max_blocks`: longest block table of one request."""
        self._device = device
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_by_request: dict[str, int] = {}
        self._lost: set[str] = set()
        self._num_blocks = [0] * num_rows
        self.prompts_to_score: dict[str, list[int]] = {}  # of requests that want prompt logprobs
        self.block_table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
        self.columns = SamplingColumns(num_rows, vocab_size)
        self.counts = TokenCounts(vocab_size, device)
        self.recent_tokens = RecentTokens(device)

    def release(self, request_ids: Iterable[str]) -> None:
        """Free these requests' rows; ids without a row (their step failed) are ignored."""
        for request_id in request_ids:
            self._lost.discard(request_id)
            self._free_row(request_id)

    def lose(self, request_ids: Iterable[str]) -> None:
        """Free the rows of a failed step's requests, admitted or not, and skip what is still
        planned for them: such steps were on their way before the failure was known."""
        for request_id in request_ids:
            self._lost.add(request_id)
            self._free_row(request_id)

    def is_lost(self, request_id: str) -> bool:
        """Whether a step of this request failed, and it has not been released since."""
        return request_id in self._lost

    def admit(self, request: RowData) -> None:
        """Give a request a row and fill it."""
        assert request.request_id not in self._row_by_request, request.request_id
        row = self._free.pop()
        self._row_by_request[request.request_id] = row
        self.block_table[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._append(row, request.block_ids)
        sampling, num_prompt = request.sampling, request.num_prompt_tokens
        self.columns.admit(row, sampling, num_prompt)
        wishes = self.columns.wishes[row]
        if wishes & Wish.PENALTIES:
            self.counts.admit(row, request.token_ids, num_prompt)
        if wishes & Wish.BAD_WORDS:
            self.recent_tokens.admit(
                row, request.token_ids, longest_start(sampling.bad_words_token_ids)
            )
        if sampling.prompt_logprobs is not None and len(request.token_ids) == num_prompt:
            # With generated tokens it comes back from preemption, and its prompt has been scored.
            self.prompts_to_score[request.request_id] = request.token_ids

    def append_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Lengthen a request's block table."""
        self._append(self._row_by_request[request_id], block_ids)

    def rows_of(self, request_ids: Sequence[str]) -> Rows:
        """The requests' rows; each must have one."""
        rows = map(self._row_by_request.__getitem__, request_ids)
        return np.fromiter(rows, np.int64, len(request_ids))

    def record(self, rows: Rows, rows_on_device: Tensor, token_ids: Tensor) -> None:
        """Note the tokens [S] just sampled for these rows, without waiting for them."""
        self.last_token.index_copy_(0, rows_on_device, token_ids)
        wishes = self.columns.wishes[rows]
        if not int(np.bitwise_or.reduce(wishes)) & _REMEMBERED:
            return
        for wish, memory in ((Wish.PENALTIES, self.counts), (Wish.BAD_WORDS, self.recent_tokens)):
            places = np.flatnonzero(wishes & wish)
            if places.size:
                at = self._device.to_device(torch.from_numpy(places))
                memory.add(rows[places], token_ids[at])

    def record_accepted(self, rows: Rows, token_ids: Tensor, drafts: Drafts) -> None:
        """The same where positions [S] stand behind drafts: only tokens of use are noted."""
        accepted = drafts.accept(token_ids)
        by_request = rows[drafts.firsts]
        on_device = self._device.to_device(torch.from_numpy(by_request))
        self.last_token.index_copy_(0, on_device, token_ids[accepted.newest])
        places = np.flatnonzero(self.columns.wishes[rows] & Wish.PENALTIES)
        if places.size:
            at = self._device.to_device(torch.from_numpy(places))
            self.counts.add(rows[places], token_ids[at], accepted.draws[at])
        places = np.flatnonzero(self.columns.wishes[by_request] & Wish.BAD_WORDS)
        if places.size:
            at = self._device.to_device(torch.from_numpy(places))
            drawn = drafts.by_request(token_ids)[at]
            self.recent_tokens.extend(by_request[places], drawn, accepted.per_request[at])

    def _free_row(self, request_id: str) -> None:
        row = self._row_by_request.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            self.prompts_to_score.pop(request_id, None)
            self.counts.release(row)
            self.recent_tokens.release(row)

    def _append(self, row: int, block_ids: Sequence[int]) -> None:
        first = self._num_blocks[row]
        self._num_blocks[row] = first + len(block_ids)
        self.block_table[row, first : self._num_blocks[row]] = block_ids
