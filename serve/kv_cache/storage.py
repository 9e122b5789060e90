"""KVStorage: the tensors behind the block ids, in device and host memory.

The pools of `block_pool.py` hand out numbers; here each number has its bytes. Block 0 of the device
tier is the null block, where padding reads and writes land, so every tier has one block more than
its pool has usable ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from serve.kv_cache.block_copy import BlockCopy

CopyBlocks = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(src, dst, src_ids, dst_ids): dst[:, dst_ids] = src[:, src_ids] for keys and values of layers."""

LayerShape = Callable[[int], tuple[int, ...]]
"""Number of blocks → shape of one layer's cache; dim 0 is K/V, dim 1 the block."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype → memory: of the device, zeroed; or of the host, such that the device copies from
and to it fast (pinned, where that exists)."""


class Tier(Enum):
    """A kind of memory that holds blocks."""

    DEVICE = "device"
    HOST = "host"


class KVStorage:
    """Keys and values of all layers, for `num_blocks` usable blocks and a host tier for swapping.

    Layers of one shape share one piece of memory, so that their blocks are copied in one launch.
    Written by attention kernels (through `layers`) and by `copy`; nobody else.
    """

    def __init__(
        self,
        layer_shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        allocate: Allocate,
        copy_blocks: CopyBlocks,
        allocate_host: Allocate,
        scales: Sequence[Tensor] | None = None,
    ) -> None:
        """`scales`: per layer, of a cache in eight bits; kept here for who reads and writes it."""
        # Zeros, not empty memory: a masked position may be multiplied by 0, and 0 * NaN is NaN.
        self.layers, self._device_groups = _allocate(layer_shapes, num_blocks + 1, dtype, allocate)
        self.scales = scales
        self._host_groups: list[Tensor] = []
        if num_host_blocks:
            _, self._host_groups = _allocate(
                layer_shapes, num_host_blocks + 1, dtype, allocate_host
            )
        self._copy_blocks = copy_blocks

    def copy(self, copies: Sequence[BlockCopy], *, src: Tier, dst: Tier) -> None:
        """Copy whole blocks of every layer between or within tiers.

        All reads of one call come before its writes, so chains of copies are safe.
        """
        if not copies:
            return
        src_ids = torch.tensor([copy.src for copy in copies], dtype=torch.int64)
        dst_ids = torch.tensor([copy.dst for copy in copies], dtype=torch.int64)
        for from_layers, to_layers in zip(self._tier(src), self._tier(dst), strict=True):
            self._copy_blocks(from_layers, to_layers, src_ids, dst_ids)

    def _tier(self, tier: Tier) -> list[Tensor]:
        groups = self._device_groups if tier is Tier.DEVICE else self._host_groups
        assert groups, f"the {tier.value} tier has no blocks"
        return groups


def _allocate(
    layer_shapes: Sequence[LayerShape], num_blocks: int, dtype: torch.dtype, allocate: Allocate
) -> tuple[list[Tensor], list[Tensor]]:
    """(each layer's cache, the memory of all layers of one shape [2 * layers, num_blocks, …])."""
    shapes = [shape(num_blocks) for shape in layer_shapes]
    groups = {
        shape: allocate((2 * shapes.count(shape), *shape[1:]), dtype)
        for shape in dict.fromkeys(shapes)
    }
    parts = {shape: iter(torch.split(group, 2)) for shape, group in groups.items()}
    return [next(parts[shape]) for shape in shapes], list(groups.values())


def block_bytes(layer_shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    elements = sum(torch.Size(shape(1)).numel() for shape in layer_shapes)
    return elements * dtype.itemsize
