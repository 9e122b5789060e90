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
from serve.kernels.triton.decode_plan import plan_pieces_kernel
from serve.kernels.triton.fp8 import converts_e4m3
from serve.kernels.triton.heads import prepare_heads_kernel
from serve.kernels.triton.kv_write import kv_write_kernel
from serve.kernels.triton.mask import mask_kernel
from serve.kernels.triton.matmul import matmul_kernel
from serve.kernels.triton.norm import add_rms_norm_kernel, rms_norm_kernel
from serve.kernels.triton.penalties import penalize_kernel
from serve.kernels.triton.rope import rotary_kernel
from serve.kernels.triton.sampling_kernels import (
    choose_kernel,
    scan_pieces_kernel,
    tile_maxima_kernel,
)
from serve.kernels.triton.tiles import Tile, load_tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("ragged", "decode")

UNALIGNED = {"controls_stride"}
"""Of any value; all other strides that Triton looks at are multiples of 16, and so are pointers."""


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
        names = self.kernel.arg_names
        signature, aligned = {}, {}
        for place, (name, parameter) in enumerate(zip(names, self.kernel.params, strict=True)):
            signature[name] = "constexpr" if name in self.constants else self.types[name]
            if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
                continue  # at a launch Triton does not look at it either
            is_pointer = signature[name].startswith("*")
            if is_pointer or (name.endswith("stride") and name not in UNALIGNED):
                aligned[(place,)] = [["tt.divisibility", 16]]
        return triton.compiler.ASTSource(self.kernel, signature, dict(self.constants), aligned)


def default_variants(target: str) -> Iterator[Variant]:
    """What a usual model compiles: bf16, heads of 128, blocks of 16, four query heads a KV head,
    and the same over an e4m3 cache."""
    for kernel in KERNELS:
        yield attention(kernel, target, "bf16", 128)
        yield attention(kernel, target, "bf16", 128, e4m3=True)
    yield from small_kernels(target, "bf16")
    yield from sampling_kernels()


def all_variants(target: str) -> Iterator[Variant]:
    """Every tile of the table and every switch of every kernel, each in one form at least.

    A tile is chosen by kernel, width of the dtype and padded head size, so bf16 stands for fp16
    where both were the same code; attention takes half a minute to compile.
    """
    yield from default_variants(target)
    for dtype in ("fp16", "fp32"):
        yield from small_kernels(target, dtype)
    for kernel in KERNELS:
        for head_dim in (64, 256):
            yield attention(kernel, target, "bf16", head_dim)
            yield attention(kernel, target, "bf16", head_dim, e4m3=True)
        for head_dim in (64, 128, 256):
            yield attention(kernel, target, "fp32", head_dim)
        for head_dim in (80, 96):  # padded to 128
            yield attention(kernel, target, "bf16", head_dim)
        yield attention(kernel, target, "fp16", 128)
        for block_size in (8, 64):  # a tile of many blocks, and a block of many tiles
            yield attention(kernel, target, "bf16", 128, block_size=block_size, group=1)
        for model in ("HAS_SOFTCAP", "HAS_SINKS"):  # Gemma, gpt-oss
            switches = {"HAS_WINDOW": True, model: True}
            yield attention(kernel, target, "bf16", 128, **switches)
    yield attention("ragged", target, "bf16", 128, ALWAYS_MASK=True)


def attention(
    which: str,
    target: str,
    dtype: str,
    head_dim: int,
    *,
    block_size: int = 16,
    group: int = 4,
    e4m3: bool = False,
    **switches: Any,
) -> Variant:
    """ "ragged" or "decode" attention with the target's own tile."""
    tile: Tile = load_tiles(target).attention(which, DTYPES[dtype], head_dim, e4m3=e4m3)
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
        "HAS_SCALES": e4m3,
    }
    constants |= {"ALWAYS_MASK": False} if which == "ragged" else {}
    constants |= switches
    kernel = ragged_attention_kernel if which == "ragged" else decode_attention_kernel
    named = " ".join(f"{name}={value}" for name, value in switches.items())
    cache = "e4m3" if e4m3 else dtype
    item_size = 1 if e4m3 else DTYPES[dtype].itemsize
    return Variant(
        f"{which} attention {dtype} cache={cache} head_dim={head_dim} block={block_size} "
        f"group={group} {named}",
        kernel,
        {
            **integers(kernel),
            "out_ptr": f"*{dtype}",
            "pieces_ptr": "*fp32",
            "piece_state_ptr": "*fp32",
            "piece_start_ptr": "*i32",
            "piece_row_ptr": "*i32",
            "query_ptr": f"*{dtype}",
            "kv_ptr": f"*{e4m3_type(target) if e4m3 else dtype}",
            "scales_ptr": "*fp32" if e4m3 else f"*{dtype}",
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
        kv_tile_bytes=2 * tile.tile_n * head_dim * item_size,
    )


def e4m3_type(target: str) -> str:
    """What an e4m3 cache is to a target's kernels."""
    return "fp8e4nv" if converts_e4m3(target) else "u8"


def small_kernels(target: str, dtype: str) -> Iterator[Variant]:
    """Everything but attention, in an 8B Llama's sizes."""
    pointers = {f"{name}_ptr": f"*{dtype}" for name in (
        "out", "x", "weight", "bias", "total", "residual", "query", "key", "value", "kv",
        "gate_up", "src", "dst", "heads",
    )}  # fmt: skip
    pointers |= {
        "slot_mapping_ptr": "*i64",
        "positions_ptr": "*i64",
        "src_ids_ptr": "*i64",
        "dst_ids_ptr": "*i64",
        "cos_sin_ptr": "*fp32",
        "seq_lens_ptr": "*i32",
        "piece_start_ptr": "*i32",
        "piece_row_ptr": "*i32",
        "pieces_ptr": "*fp32",
        "piece_state_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scales_ptr": "*fp32",
        "query_norm_ptr": "*fp32",
        "key_norm_ptr": "*fp32",
        "eps": "fp32",
        "kv_stride": "i64",
        "src_part_stride": "i64",
        "dst_part_stride": "i64",
    }

    def variant(name: str, kernel: Any, num_warps: int, **constants: Any) -> Variant:
        types = integers(kernel) | pointers
        if constants.get("HAS_SCALES"):
            types["kv_ptr"] = f"*{e4m3_type(target)}"
        return Variant(f"{name} {dtype}", kernel, types, constants, num_warps)

    head = {"HEAD_DIM": 128, "PADDED_DIM": 128}
    for e4m3 in (False, True):
        cached = {**head, "BLOCK_SIZE": 16, "HAS_SCALES": e4m3}
        yield variant(f"kv_write e4m3={e4m3}", kv_write_kernel, 1, **cached)
        shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HEADS": 4, "HAS_NORMS": e4m3}
        yield variant(f"heads e4m3={e4m3}", prepare_heads_kernel, 2, **cached, **shape)
    yield variant("rms_norm", rms_norm_kernel, 8, N=4096, PADDED_N=4096)
    yield variant("add_rms_norm", add_rms_norm_kernel, 8, N=4096, PADDED_N=4096)
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "PADDED_HALF": 64, "HEADS": 8}
    yield variant("rotary", rotary_kernel, 2, **heads)
    yield variant("gated_act", gated_act_kernel, 4, N=14336, COLUMNS=1024, GELU=False)
    yield variant("block_copy", block_copy_kernel, 4, BLOCK_ELEMENTS=16384, PIECE=4096)
    yield variant("plan", plan_pieces_kernel, 4, TILE_N=64, ROWS=64, LENGTHS=32)
    yield variant("merge", merge_pieces_kernel, 4, **head, PIECES=16, HAS_SINKS=True)
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
    """Draw, penalties and mask, for vocabularies of 128,256 (126 tiles in 16 pieces) and, where
    the sizes of what is held in registers depend on it, 262,208 (Gemma 3)."""
    pointers = {
        "logits_ptr": "*fp32",
        "controls_ptr": "*fp32",
        "tiles_ptr": "*fp32",
        "pieces_ptr": "*fp32",
        "list_ptr": "*fp32",
        "keys_ptr": "*i32",
        "generated_ptr": "*i32",
        "in_prompt_ptr": "*i1",
        "out_ptr": "*i64",
        "rows_ptr": "*i64",
        "bits_ptr": "*i32",
    }
    vocab = {"VOCAB": 128_256}
    tiles = {"ALL_TILES": 128, "PADDED_TILES": 128}
    lists = {"LIST": 128, "PIECES": 16, "PADDED_PIECES": 16}
    for kernel, num_warps, constants in (
        (tile_maxima_kernel, 8, {"TILE": 1024, "TILES": 8}),
        (scan_pieces_kernel, 8, {"PIECE": 8192, "LIST": 128, **tiles}),
        (choose_kernel, 8, {"TILE": 1024, **lists, **tiles}),
        (penalize_kernel, 4, {"TILE": 1024}),
        (mask_kernel, 4, {"TILE": 1024}),
    ):
        types = integers(kernel) | pointers
        yield Variant(kernel.__name__, kernel, types, vocab | constants, num_warps)
    large = {"VOCAB": 262_208, "ALL_TILES": 264, "PADDED_TILES": 512, "LIST": 32}
    pieces = {"TILE": 1024, "PIECES": 33, "PADDED_PIECES": 64}
    for kernel, constants in (
        (scan_pieces_kernel, {"PIECE": 8192, **large}),
        (choose_kernel, {**pieces, **large}),
    ):
        types = integers(kernel) | pointers
        yield Variant(f"{kernel.__name__} of a large vocabulary", kernel, types, constants, 8)


def integers(kernel: Any) -> dict[str, str]:
    """Every argument as a 32-bit integer, to be corrected by what is not one."""
    return dict.fromkeys(kernel.arg_names, "i32")
