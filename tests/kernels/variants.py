"""Every kernel in every form it is compiled to, as data: names, argument types, constants, tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from serve.kernels.triton.activation import gated_act_kernel
from serve.kernels.triton.attention import ragged_attention_kernel
from serve.kernels.triton.block_copy import block_copy_kernel
from serve.kernels.triton.decode_attention import decode_attention_kernel, merge_pieces_kernel
from serve.kernels.triton.kv_write import kv_write_kernel
from serve.kernels.triton.matmul import matmul_kernel
from serve.kernels.triton.norm import add_rms_norm_kernel, rms_norm_kernel
from serve.kernels.triton.rope import rotary_kernel
from serve.kernels.triton.sampling import draw_kernel, penalize_kernel
from serve.kernels.triton.tiles import Tile, load_tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)

UNALIGNED = {"table_stride", "controls_stride"}
"""Integers of any value; all other strides are multiples of 16, and so are all pointers."""


@dataclass(frozen=True)
class Variant:
    """One compilation."""

    label: str
    kernel: Any
    types: Mapping[str, str]  # of the arguments that are not constants
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    kv_tile_bytes: int = 0  # of keys and values that one step of the loop reads
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self) -> triton.compiler.ASTSource:
        signature, aligned = {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            signature[name] = "constexpr" if name in self.constants else self.types[name]
            is_pointer = signature[name].startswith("*")
            if is_pointer or (name.endswith("stride") and name not in UNALIGNED):
                aligned[(place,)] = [["tt.divisibility", 16]]
        return triton.compiler.ASTSource(self.kernel, signature, dict(self.constants), aligned)


def default_variants(target: str) -> Iterator[Variant]:
    """What a usual model compiles: bf16, heads of 128, blocks of 16, four query heads a KV head."""
    yield attention("ragged", target, "bf16", 128)
    yield attention("decode", target, "bf16", 128)
    yield from small_kernels(target, "bf16")


def all_variants(target: str) -> Iterator[Variant]:
    """Every configuration of the tile table, and every switch of every kernel."""
    for dtype in DTYPES:
        yield from small_kernels(target, dtype)
        for kernel in ("ragged", "decode"):
            for head_dim in HEAD_DIMS:
                yield attention(kernel, target, dtype, head_dim)
    for kernel in ("ragged", "decode"):
        for block_size in BLOCK_SIZES:
            yield attention(kernel, target, "bf16", 128, block_size=block_size, group=1)
        for switch in ("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"):
            yield attention(kernel, target, "bf16", 128, **{switch: True})
    yield attention("ragged", target, "bf16", 128, ALWAYS_MASK=True)
    yield attention("decode", target, "bf16", 128, NUM_SPLITS=8)


def attention(
    which: str,
    target: str,
    dtype: str,
    head_dim: int,
    *,
    block_size: int = 16,
    group: int = 4,
    **switches: Any,
) -> Variant:
    """ "ragged" or "decode" attention with the target's own tile."""
    tile: Tile = load_tiles(target).attention(which, DTYPES[dtype], head_dim)
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "TILE_N": tile.tile_n,
        "HAS_WINDOW": False,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
    }
    constants |= {"ALWAYS_MASK": False} if which == "ragged" else {"NUM_SPLITS": 1}
    constants |= switches
    piece = "fp32" if constants.get("NUM_SPLITS", 1) > 1 else dtype
    kernel = ragged_attention_kernel if which == "ragged" else decode_attention_kernel
    named = " ".join(f"{name}={value}" for name, value in switches.items())
    return Variant(
        f"{which} attention {dtype} head_dim={head_dim} block={block_size} group={group} {named}",
        kernel,
        {
            **integers(kernel),
            "out_ptr": f"*{piece}",
            "piece_state_ptr": f"*{piece}",
            "query_ptr": f"*{dtype}",
            "kv_ptr": f"*{dtype}",
            "sinks_ptr": "*fp32" if constants["HAS_SINKS"] else f"*{dtype}",
            "query_start_ptr": "*i32",
            "seq_lens_ptr": "*i32",
            "table_ptr": "*i32",
            "kv_stride": "i64",
            "scale_log2": "fp32",
            "softcap": "fp32",
        },
        constants,
        tile.num_warps,
        tile.num_stages,
        kv_tile_bytes=2 * tile.tile_n * head_dim * DTYPES[dtype].itemsize,
    )


def small_kernels(target: str, dtype: str) -> Iterator[Variant]:
    """Everything but attention, in an 8B Llama's sizes."""
    pointers = {f"{name}_ptr": f"*{dtype}" for name in (
        "out", "x", "weight", "bias", "total", "residual", "query", "key", "value", "kv",
        "gate_up", "src", "dst",
    )}  # fmt: skip
    pointers |= {
        "slot_mapping_ptr": "*i64",
        "positions_ptr": "*i64",
        "src_ids_ptr": "*i64",
        "dst_ids_ptr": "*i64",
        "cos_sin_ptr": "*fp32",
        "pieces_ptr": "*fp32",
        "piece_state_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "eps": "fp32",
        "kv_stride": "i64",
        "src_half_stride": "i64",
        "dst_half_stride": "i64",
    }

    def variant(name: str, kernel: Any, num_warps: int, **constants: Any) -> Variant:
        return Variant(f"{name} {dtype}", kernel, integers(kernel) | pointers, constants, num_warps)

    head = {"HEAD_DIM": 128, "PADDED_DIM": 128}
    yield variant("kv_write", kv_write_kernel, 1, **head, BLOCK_SIZE=16)
    yield variant("rms_norm", rms_norm_kernel, 8, N=4096, PADDED_N=4096)
    yield variant("add_rms_norm", add_rms_norm_kernel, 8, N=4096, PADDED_N=4096)
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "PADDED_HALF": 64, "HEADS": 8}
    yield variant("rotary", rotary_kernel, 2, **heads)
    yield variant("gated_act", gated_act_kernel, 4, N=14336, COLUMNS=1024, GELU=False)
    yield variant("block_copy", block_copy_kernel, 4, BLOCK_ELEMENTS=16384, PIECE=4096)
    yield variant("merge", merge_pieces_kernel, 4, **head, NUM_SPLITS=32, HAS_SINKS=True)
    yield from sampling_kernels()
    tile = load_tiles(target).matmul(DTYPES[dtype])
    yield Variant(
        f"matmul {dtype}",
        matmul_kernel,
        integers(matmul_kernel) | pointers,
        {
            "OUT": 4096,
            "IN": 4096,
            "BLOCK_M": tile.block_m,
            "TILE_N": tile.tile_n,
            "TILE_K": tile.tile_k,
            "HAS_BIAS": True,
        },
        tile.num_warps,
        tile.num_stages,
    )


def sampling_kernels() -> Iterator[Variant]:
    """The draw and the penalties, for a vocabulary of 128,256."""
    constants = {"VOCAB": 128_256, "TILE": 1024}
    pointers = {
        "logits_ptr": "*fp32",
        "controls_ptr": "*fp32",
        "keys_ptr": "*i32",
        "generated_ptr": "*i32",
        "in_prompt_ptr": "*i1",
        "out_ptr": "*i64",
    }
    for kernel, num_warps in ((draw_kernel, 8), (penalize_kernel, 4)):
        types = integers(kernel) | pointers
        yield Variant(kernel.__name__, kernel, types, constants, num_warps)


def integers(kernel: Any) -> dict[str, str]:
    """Every argument as a 32-bit integer, to be corrected by what is not one."""
    return dict.fromkeys(kernel.arg_names, "i32")
