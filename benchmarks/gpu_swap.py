"""Swapping: all layers' blocks to host memory and back, beside a plain pinned copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_machine import Machine
from benchmarks.gpu_plan import Row
from serve.kernels.triton import triton_kernels


def swap_rows(machine: Machine) -> Iterator[Row]:
    """Blocks in any order through the copy kernel, one launch for all layers of an 8B model."""
    kernels = triton_kernels()
    on_gpu = machine.device.type == "cuda"
    num_blocks, num_layers = (256, 32) if on_gpu else (4, 2)
    _, *block = kernels.attention.kv_shape(
        num_blocks, machine.block_size, machine.num_kv_heads, machine.head_dim
    )
    shape = (2 * num_layers, *block)
    device = torch.zeros(shape, dtype=machine.dtype, device=machine.device)
    host = torch.zeros(shape, dtype=machine.dtype, pin_memory=on_gpu)
    shuffled, ordered = torch.randperm(num_blocks), torch.arange(num_blocks)
    size = device.numel() * device.element_size()
    for way, source, target in (("out", device, host), ("in", host, device)):
        swapping = machine.seconds(
            lambda s=source, t=target: kernels.copy_blocks(s, t, shuffled, ordered)  # type: ignore[misc]
        )
        plain = machine.seconds(lambda s=source, t=target: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        yield {
            "into the GPU": way == "in",
            "GB/s": size / swapping / 1e9,
            "plain GB/s": size / plain / 1e9,
            "share of plain": plain / swapping,
        }
