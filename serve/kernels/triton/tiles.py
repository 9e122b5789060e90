"""Tile sizes per GPU generation, read from `tiles.json`; nothing is tuned while serving.

The file maps a target ("cuda:90", "hip:gfx942", "interpreter") to kernels, a kernel to shape
classes, a class to its tile. "generic" is for any other target, and for what a target leaves out;
a target that names another one shares its tiles.

On NVIDIA, 5 stages are what it takes to keep two tiles of keys in flight: the load of the block ids
that each address hangs on counts as stages too. Tensor-core tiles are as large as the compiler
manages without spilling registers; see tests/kernels/test_triton_compile.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
import triton


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration: rows and columns of the tile a program owns, depth of its inner
    step (matmul only), the compiler's two knobs, and how many programs fit side by side on one
    multiprocessor (decode only)."""

    block_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    tile_k: int = 0
    per_multiprocessor: int = 2


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one target."""

    target: str
    tiles: Mapping[str, Mapping[str, Tile]]  # kernel → shape class → tile

    def attention(
        self, kernel: str, dtype: torch.dtype, head_dim: int, *, e4m3: bool = False
    ) -> Tile:
        """The tile of "ragged" or "decode" attention for a query's dtype and a head size.

        An e4m3 cache has one of its own where the other would spill: its numbers are widened in
        registers.
        """
        width = max(64, 1 << (head_dim - 1).bit_length())
        tiles, bits = self.tiles[kernel], dtype.itemsize * 8
        tile = tiles[f"{bits}bit/{width}"]
        return tiles.get(f"{bits}bit e4m3/{width}", tile) if e4m3 else tile

    def matmul(self, dtype: torch.dtype) -> Tile:
        """The one tile of the batch-invariant matmul for a dtype."""
        return self.tiles["matmul"][f"{dtype.itemsize * 8}bit"]


def load_tiles(target: str) -> TileTable:
    """The table of a target; what it does not list is taken from "generic"."""
    text = resources.files("serve.kernels.triton").joinpath("tiles.json").read_text("utf-8")
    tables: dict[str, str | dict[str, dict[str, dict[str, int]]]] = json.loads(text)
    own = tables.get(target, {})
    if isinstance(own, str):
        own = tables[own]
    merged: dict[str, dict[str, Tile]] = {}
    for table in (tables["generic"], own):
        assert not isinstance(table, str), f"{target} shares the tiles of a target that shares"
        for kernel, classes in table.items():
            merged.setdefault(kernel, {}).update({c: Tile(**t) for c, t in classes.items()})
    return TileTable(target, merged)


def current_target() -> str:
    """The GPU this process uses, or "interpreter" where there is none to compile for."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"{target.backend}:{target.arch}"


@cache
def multiprocessor_count(device: torch.device) -> int:
    """How many programs run side by side at least; a made-up 8 under Triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return 8
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["multiprocessor_count"])
