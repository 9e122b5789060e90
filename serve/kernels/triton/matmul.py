"""Linear layers whose rows do not depend on their company, for batch-invariant mode.

A vendor's matmul picks its tile, and whether to split the sum, by the number of rows, so the same
row rounds differently in another batch. Here the tile is fixed and each result is one sum in one
order.

Shapes   x [T, in], weight [out, in], bias [out] → [T, out].
Dtypes   fp32, fp16, bf16; sums in fp32, rounded once after the bias.
Grid     as many programs as multiprocessors; each walks the tiles of the result, the tiles that
         share columns of `weight` one after another so that they stay in the L2 cache.
Bytes    at best T * in + out * in + T * out elements. FLOPs: 2 * T * in * out.
Source   batch invariance: Defeating Nondeterminism in LLM Inference (Thinking Machines, 2025);
         persistent programs: the matmul tutorials of Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.launch import Launcher, cdiv
from serve.kernels.triton.tiles import Tile, multiprocessor_count


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    x_stride,
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,  # Qwen 2's projections
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    num_tiles = tiles_m * tl.cdiv(OUT, TILE_N)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile // tiles_m * TILE_N + tl.arange(0, TILE_N)
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride
        weight_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * IN
        total = tl.zeros([BLOCK_M, TILE_N], tl.float32)
        for start in tl.range(0, IN, TILE_K):
            inner = start + tl.arange(0, TILE_K)
            x_mask = (rows < num_rows)[:, None] & (inner < IN)[None, :]
            x = tl.load(x_ptrs + inner[None, :], mask=x_mask, other=0.0)
            weight_mask = (columns < OUT)[:, None] & (inner < IN)[None, :]
            weight = tl.load(weight_ptrs + inner[None, :], mask=weight_mask, other=0.0)
            total = tl.dot(x, tl.trans(weight), acc=total, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < OUT, other=0.0)
            total += bias.to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < OUT)[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


_multiply = Launcher(matmul_kernel)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """x @ weight.T + bias; row i of the result depends on row i of x alone, bit for bit."""
    assert x.ndim == weight.ndim == 2, (x.shape, weight.shape)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.stride(1) == 1, x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert bias is None or bias.shape == weight.shape[:1], (bias, weight.shape)
    num_rows, out_features = x.shape[0], weight.shape[0]
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    num_tiles = cdiv(num_rows, tile.block_m) * cdiv(out_features, tile.tile_n)
    if num_tiles:
        _multiply(
            (min(num_tiles, multiprocessor_count(x.device)), 1, 1),
            (out, x, weight, bias if bias is not None else weight),
            (x.stride(0),),
            (num_rows,),
            (
                out_features,
                x.shape[1],
                tile.block_m,
                tile.tile_n,
                tile.tile_k,
                bias is not None,
            ),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out
