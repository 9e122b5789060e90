"""Choosing tokens and scoring them on the CPU, in a few passes over each row of logits."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from serve.kernels.cpu.library import Library, Scores, as_rows
from serve.kernels.sampling import LogprobTensors


class RowSampling:
    """Rows are shared among the threads; methods have the protocols of `base.py`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def argmax(self, logits: Tensor, out: Tensor) -> Tensor:
        logits = as_rows(logits)
        _check_tokens(out, len(logits))
        self._library.argmax(self._library.pool, logits.data_ptr(), *logits.shape, out.data_ptr())
        return out

    def draw(
        self, logits: Tensor, controls: Tensor, keys: Tensor, out: Tensor | None = None
    ) -> Tensor:
        logits, controls = as_rows(logits), as_rows(controls)
        if out is None:
            out = torch.empty(len(logits), dtype=torch.int64)
        _check_tokens(out, len(logits))
        assert controls.shape[0] == len(logits), (controls.shape, logits.shape)
        assert controls.shape[1] >= 4, controls.shape
        assert keys.shape == (len(logits), 2), (keys.shape, logits.shape)
        assert keys.dtype is torch.int32
        assert keys.is_contiguous()
        self._library.draw(
            *(self._library.pool, logits.data_ptr(), *logits.shape),
            *(controls.data_ptr(), controls.shape[1], keys.data_ptr(), out.data_ptr()),
        )
        return out

    def penalize(
        self, logits: Tensor, controls: Tensor, generated: Tensor, in_prompt: Tensor
    ) -> None:
        controls = as_rows(controls)
        assert controls.shape == (len(logits), 3), (controls.shape, logits.shape)
        assert logits.dtype is torch.float32
        assert generated.dtype is torch.int32
        assert in_prompt.dtype is torch.bool
        for table in (logits, generated, in_prompt):
            assert table.shape == logits.shape, (table.shape, logits.shape)
            assert table.is_contiguous()
        self._library.penalize(
            *(self._library.pool, logits.data_ptr(), *logits.shape, controls.data_ptr()),
            *(generated.data_ptr(), in_prompt.data_ptr()),
        )

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        vocab_size = logits.shape[1]
        assert logits.dtype is torch.float32
        assert rows.dtype is torch.int64
        assert bits.dtype is torch.int32
        assert bits.shape == (len(rows), -(-vocab_size // 32)), (bits.shape, logits.shape)
        for array in (logits, rows, bits):
            assert array.is_contiguous()
        self._library.mask(
            *(self._library.pool, logits.data_ptr(), vocab_size),
            *(rows.data_ptr(), bits.data_ptr(), len(rows)),
        )

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
        logits = as_rows(logits)
        num_rows, vocab_size = logits.shape
        token_ids = token_ids.contiguous()
        _check_tokens(token_ids, num_rows)
        num_top = min(num_top, vocab_size)
        scores = LogprobTensors(
            token_ids=token_ids,
            logprobs=torch.empty(num_rows),
            ranks=torch.empty(num_rows, dtype=torch.int64),
            top_token_ids=torch.empty(num_rows, num_top, dtype=torch.int64),
            top_logprobs=torch.empty(num_rows, num_top),
        )
        places = Scores(
            *(scores.logprobs.data_ptr(), scores.ranks.data_ptr()),
            *(scores.top_token_ids.data_ptr(), scores.top_logprobs.data_ptr()),
        )
        self._library.score(
            *(self._library.pool, logits.data_ptr(), num_rows, vocab_size),
            *(token_ids.data_ptr(), num_top, byref(places)),
        )
        return scores


def _check_tokens(token_ids: Tensor, num_rows: int) -> None:
    assert token_ids.shape == (num_rows,), (token_ids.shape, num_rows)
    assert token_ids.dtype is torch.int64
    assert token_ids.is_contiguous()
