"""The gated activation of an MLP: activation(gate) * up.

Shapes   gate_up [T, 2n], gate first → [T, n].
Dtypes   fp32, fp16, bf16; computed in fp32 and rounded once.
Grid     [T, n / 1024].
Bytes    reads 2 and writes 1 element per result. FLOPs: about 10 per result.
Source   GLU variants (arXiv:2002.05202); GELU by tanh (arXiv:1606.08415).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.launch import Launcher, cdiv

_COLUMNS = 1024
_ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def gated_act_kernel(
    out_ptr,
    gate_up_ptr,
    row_stride,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    GELU: tl.constexpr,  # Gemma; the others use SiLU
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < N
    gate_ptrs = gate_up_ptr + row * row_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + N, mask=mask, other=0.0).to(tl.float32)
    argument = gate
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z); z = sqrt(2 / pi) * (x + 0.044715 x^3)
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate * tl.sigmoid(argument) * up
    tl.store(out_ptr + row * N + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


_gated_act = Launcher(gated_act_kernel)


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """activation(first half) * second half; "silu" or "gelu_tanh", else ValueError."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; known: {', '.join(_ACTIVATIONS)}")
    assert gate_up.ndim == 2, gate_up.shape
    assert gate_up.stride(1) == 1, gate_up.stride()
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_act(
            (rows, cdiv(n, _COLUMNS), 1),
            (out, gate_up),
            (gate_up.stride(0),),
            (),
            (n, _COLUMNS, activation == "gelu_tanh"),
            num_warps=4,
        )
    return out
