"""Norms, rotary embedding and gated activations on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from serve.kernels.cpu.library import Library, as_rows

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class RowKernels:
    """The operations that treat every row for itself; methods have the protocols of `base.py`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = as_rows(x), as_rows(weight)
        n = x.shape[-1]
        out = torch.empty_like(x)
        self._library.rms_norm(
            *(self._library.pool, x.data_ptr(), n, None, weight.data_ptr(), eps),
            *(x.numel() // n, n, None, out.data_ptr()),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, residual, weight = as_rows(x), as_rows(residual), as_rows(weight)
        n = x.shape[-1]
        out, summed = torch.empty_like(x), torch.empty_like(x)
        self._library.rms_norm(
            *(self._library.pool, x.data_ptr(), n, residual.data_ptr(), weight.data_ptr(), eps),
            *(x.numel() // n, n, summed.data_ptr(), out.data_ptr()),
        )
        return out, summed

    def rotary(
        self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """In place where the heads lie densely, as in a slice of fused qkv."""
        assert positions.dtype is torch.int64
        positions, cos_sin = positions.contiguous(), as_rows(cos_sin)
        return (
            self._rotate(query, cos_sin, positions),
            self._rotate(key, cos_sin, positions),
        )

    def _rotate(self, heads: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
        assert heads.dtype is torch.float32
        if heads.stride(-1) != 1:
            heads = heads.contiguous()
        num_tokens, num_heads, _ = heads.shape
        self._library.rotate(
            *(self._library.pool, heads.data_ptr(), heads.stride(0), heads.stride(1)),
            *(num_tokens, num_heads, cos_sin.shape[1], cos_sin.data_ptr(), positions.data_ptr()),
        )
        return heads

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        rows = as_rows(gate_up)
        n = rows.shape[-1] // 2
        out = rows.new_empty(*rows.shape[:-1], n)
        self._library.gated_act(
            *(self._library.pool, rows.data_ptr(), ACTIVATIONS[activation]),
            *(rows.numel() // (2 * n), n, out.data_ptr()),
        )
        return out
