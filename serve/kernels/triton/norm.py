"""RMS norm, alone and joined to the residual addition before it.

Shapes   x [..., n]; weight [n] (Gemma's 1 + w is folded in at load); result like x, contiguous.
Dtypes   fp32, fp16, bf16; sums and products in fp32, rounded once at the end.
Grid     one program per row, which holds the whole row: the order of the sum depends on n alone,
         so a row's result does not depend on the other rows.
Bytes    norm reads and writes x once (2 * rows * n elements); add + norm reads two and writes two.
FLOPs    4 per element (5 with the addition).
Source   RMSNorm (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.launch import Launcher


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    outer_stride,
    inner_stride,
    eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
):
    outer = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1)
    columns = tl.arange(0, PADDED_N)
    mask = columns < N
    x_row_ptr = x_ptr + outer * outer_stride + inner * inner_stride
    x = tl.load(x_row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = normalised_row(x, weight_ptr, columns, mask, eps, N)
    out_row_ptr = out_ptr + (outer * tl.num_programs(1) + inner) * N
    tl.store(out_row_ptr + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def add_rms_norm_kernel(
    out_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_N)
    mask = columns < N
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
    # Rounded before the norm: the next layer adds to what is stored, so both must see one value.
    total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * N + columns, total, mask=mask)
    normed = normalised_row(total.to(tl.float32), weight_ptr, columns, mask, eps, N)
    tl.store(out_ptr + row * N + columns, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def normalised_row(x, weight_ptr, columns, mask, eps, N: tl.constexpr):
    """x / rms(x) * weight, fp32; x is 0 where mask is False."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    return x * scale * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)


_norm = Launcher(rms_norm_kernel)
_add_norm = Launcher(add_rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dim. x may be a slice [T, n] or [T, heads, n] of a wider tensor."""
    rows = x if x.ndim in (2, 3) else x.reshape(-1, x.shape[-1])
    if rows.ndim == 2:
        rows = rows.unsqueeze(1)
    outer, inner, n = rows.shape
    _check(rows, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if outer and inner:
        _norm(
            (outer, inner, 1),
            (out, rows, weight),
            rows.stride()[:2],
            (eps,),
            (n, _padded(n)),
            num_warps=_num_warps(n),
        )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) for x and residual [T, n]."""
    assert x.ndim == 2, x.shape
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    _check(x, weight)
    _check(residual, weight)
    rows, n = x.shape
    out, total = (torch.empty((rows, n), dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        _add_norm(
            (rows, 1, 1),
            (out, total, x, residual, weight),
            (x.stride(0), residual.stride(0)),
            (eps,),
            (n, _padded(n)),
            num_warps=_num_warps(n),
        )
    return out, total


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16), x.dtype
    assert x.stride(-1) == 1, x.stride()
    assert weight.shape == x.shape[-1:], (weight.shape, x.shape)
    assert weight.is_contiguous(), weight.stride()


def _num_warps(n: int) -> int:
    """About 8 elements, one 16-byte load, per thread and pass."""
    return min(8, max(1, _padded(n) // 512))


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length()
