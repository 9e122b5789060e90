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
"""(src, dst, src_ids, dst_ids): dst[:, dst_ids] = src[:, src_ids] for one layer's cache."""

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
    ) -> None:
        # Zeros, not empty memory: a masked position may be multiplied by 0, and 0 * NaN is NaN.
        self.layers = [allocate(shape(num_blocks + 1), dtype) for shape in layer_shapes]
        self._host_layers = (
            [allocate_host(shape(num_host_blocks + 1), dtype) for shape in layer_shapes]
            if num_host_blocks
            else []
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
        for from_layer, to_layer in zip(self._tier(src), self._tier(dst), strict=True):
            self._copy_blocks(from_layer, to_layer, src_ids, dst_ids)

    def _tier(self, tier: Tier) -> list[Tensor]:
        layers = self.layers if tier is Tier.DEVICE else self._host_layers
        assert layers, f"the {tier.value} tier has no blocks"
        return layers


def block_bytes(layer_shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes that one block takes in all layers together."""
    elements = sum(torch.Size(shape(1)).numel() for shape in layer_shapes)
    return elements * dtype.itemsize
