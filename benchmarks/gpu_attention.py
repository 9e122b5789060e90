"""Speed of decode, mixed and prefill attention over a shuffled paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.gpu_machine import Machine, Rates
from benchmarks.gpu_plan import Row
from serve.kernels.base import AttentionBackend, AttentionMetadata
from serve.kernels.triton import triton_kernels
from serve.kernels.triton.backend import TritonAttention
from serve.kernels.triton.tiles import TileTable, current_target, load_tiles


def decode_rows(machine: Machine, rates: Rates) -> Iterator[Row]:
    """Keys and values read per second, per batch and context, and the share of copy bandwidth."""
    for batch in machine.decode_batches:
        for context in machine.decode_contexts:
            for e4m3 in (False, True):
                time = attention_seconds(machine, [1] * batch, [context] * batch, e4m3=e4m3)
                num_bytes = 2 * batch * context * machine.num_kv_heads * machine.head_dim
                gb_s = num_bytes * (1 if e4m3 else machine.dtype.itemsize) / time / 1e9
                yield {
                    "batch": batch,
                    "context": context,
                    "e4m3": e4m3,
                    "microseconds": time * 1e6,
                    "GB/s": gb_s,
                    "share of copy": gb_s / rates.copy_gb_s,
                }


def mixed_rows(machine: Machine) -> Iterator[Row]:
    """Decodes of even and uneven lengths, with and without a prompt beside them."""
    for contexts, prompt in machine.mixes:
        prompts = [prompt] * (prompt > 0)
        time = attention_seconds(machine, [1] * len(contexts) + prompts, contexts + prompts)
        yield {
            "decodes": len(contexts),
            "shortest": min(contexts),
            "longest": max(contexts),
            "prompt": prompt,
            "microseconds": time * 1e6,
        }


def tile_rows(machine: Machine, rates: Rates) -> Iterator[Row]:
    """Prefill attention with other tiles than the table's, to see whether it should change."""
    length = machine.prefill_lens[0]
    flops = 2 * length * length * machine.num_heads * machine.head_dim
    table = load_tiles(current_target())
    width = f"{machine.dtype.itemsize * 8}bit/{machine.head_dim}"
    chosen = table.tiles["ragged"][width]
    for tile_n, stages, warps in ((0, 0, 0), (128, 3, 8), (128, 4, 8), (64, 3, 8), (64, 4, 4)):
        tile = chosen
        if tile_n:
            tile = replace(chosen, tile_n=tile_n, num_stages=stages, num_warps=warps)
        changed = {**table.tiles, "ragged": {**table.tiles["ragged"], width: tile}}
        backend = TritonAttention(TileTable(table.target, changed))
        row: Row = {
            "the table's": tile is chosen,
            "tile_n": tile.tile_n,
            "stages": tile.num_stages,
            "warps": tile.num_warps,
        }
        try:
            time = attention_seconds(machine, [length], [length], backend=backend)
        except OutOfResources as error:
            yield {**row, "why not": str(error)}
            continue
        tflop_s = flops / time / 1e12
        yield {**row, "TFLOP/s": tflop_s, "share of matmul": tflop_s / rates.matmul_tflop_s}


def prefill_rows(machine: Machine, rates: Rates) -> Iterator[Row]:
    """Rate of one causal prompt, its share of the matmul rate, and torch's attention beside it."""
    for length in machine.prefill_lens:
        time = attention_seconds(machine, [length], [length])
        flops = 2 * length * length * machine.num_heads * machine.head_dim  # half of them masked
        tflop_s = flops / time / 1e12
        yield {
            "length": length,
            "microseconds": time * 1e6,
            "TFLOP/s": tflop_s,
            "share of matmul": tflop_s / rates.matmul_tflop_s,
            "times torch's speed": torch_seconds(machine, length) / time,
        }


def attention_seconds(
    machine: Machine,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    e4m3: bool = False,
    backend: AttentionBackend | None = None,
) -> float:
    """Time of one layer's attention, the blocks of all requests shuffled together."""
    backend = backend or triton_kernels().attention
    blocks_per_row = -(-max(seq_lens) // machine.block_size)
    num_blocks = blocks_per_row * len(seq_lens)
    kv = torch.empty(
        backend.kv_shape(
            num_blocks + 1, machine.block_size, machine.num_kv_heads, machine.head_dim
        ),
        dtype=machine.dtype,
        device=machine.device,
    ).normal_()
    kv_scales = None
    if e4m3:
        kv = kv.to(torch.float8_e4m3fn)
        kv_scales = torch.ones(2, machine.num_kv_heads, device=machine.device)
    table = torch.randperm(num_blocks, device=machine.device).view(len(seq_lens), -1) + 1
    query = _normal(machine, sum(query_lens), machine.num_heads)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(machine.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=machine.device),
        block_table=table.int(),
        slot_mapping=torch.zeros(len(query), dtype=torch.int64, device=machine.device),
        num_decode_rows=sum(length == 1 for length in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    scale = machine.head_dim**-0.5
    return machine.seconds(
        lambda: backend.attend(query, kv, meta, scale=scale, kv_scales=kv_scales)
    )


def torch_seconds(machine: Machine, length: int) -> float:
    """The same prompt through scaled_dot_product_attention on contiguous keys and values."""
    query = _normal(machine, length, machine.num_heads).transpose(0, 1)[None]
    key, value = (
        _normal(machine, length, machine.num_kv_heads).transpose(0, 1)[None] for _ in range(2)
    )
    return machine.seconds(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    )


def _normal(machine: Machine, tokens: int, heads: int) -> Tensor:
    shape = (tokens, heads, machine.head_dim)
    return torch.empty(shape, dtype=machine.dtype, device=machine.device).normal_()
