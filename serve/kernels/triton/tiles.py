"""Tile sizes per GPU generation, read from `tiles.json`; nothing is tuned while serving.

The file maps a target ("cuda:90", "hip:gfx942", "interpreter") to kernels, a kernel to shape
classes, a class to its tile. "generic" is for any other target, and for what a target leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import torch
import triton


@dataclass(frozen=True, slots=True)
class Tile:
    """One launch configuration: rows and columns of the tile a program owns, depth of its inner
    step (matmul only), and the compiler's two knobs."""

    block_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    tile_k: int = 0


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one target."""

    target: str
    tiles: Mapping[str, Mapping[str, Tile]]  # kernel → shape class → tile

    def attention(self, kernel: str, dtype: torch.dtype, head_dim: int) -> Tile:
        """The tile of "ragged" or "decode" attention for a dtype and a head size."""
        width = max(64, triton.next_power_of_2(head_dim))
        return self.tiles[kernel][f"{dtype.itemsize * 8}bit/{width}"]

    def matmul(self, dtype: torch.dtype) -> Tile:
        """The one tile of the batch-invariant matmul for a dtype."""
        return self.tiles["matmul"][f"{dtype.itemsize * 8}bit"]


def load_tiles(target: str) -> TileTable:
    """The table of a target; what it does not list is taken from "generic"."""
    text = resources.files("serve.kernels.triton").joinpath("tiles.json").read_text("utf-8")
    tables: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(text)
    merged: dict[str, dict[str, Tile]] = {}
    for name in ("generic", target):
        for kernel, classes in tables.get(name, {}).items():
            merged.setdefault(kernel, {}).update({c: Tile(**t) for c, t in classes.items()})
    return TileTable(target, merged)


def current_target() -> str:
    """The GPU this process uses, or "interpreter" where there is none to compile for."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"{target.backend}:{target.arch}"


def multiprocessor_count(device: torch.device) -> int:
    """How many programs run side by side at least; a made-up 8 under Triton's interpreter."""
    if device.type == "cpu":
        return 8
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["multiprocessor_count"])
