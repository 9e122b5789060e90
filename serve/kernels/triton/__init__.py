"""The GPU's operations, as Triton kernels. Importing this package needs Triton, but no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import triton
from torch import Tensor

from serve.kernels import reference
from serve.kernels.base import Kernels, PackedLinear
from serve.kernels.sampling import SamplingKernels
from serve.kernels.stored import StoredMatrix, dequantize, stack
from serve.kernels.triton.activation import gated_act
from serve.kernels.triton.backend import TritonAttention
from serve.kernels.triton.block_copy import copy_blocks
from serve.kernels.triton.flashinfer import FlashInferAttention
from serve.kernels.triton.mask import mask
from serve.kernels.triton.matmul import invariant_linear
from serve.kernels.triton.norm import add_rms_norm, rms_norm
from serve.kernels.triton.penalties import penalize
from serve.kernels.triton.rope import rotary
from serve.kernels.triton.sampling import draw
from serve.kernels.triton.tiles import current_target, load_tiles
from serve.kernels.triton.toolchain import showing_progress


def triton_kernels(*, batch_invariant: bool = False) -> Kernels:
    """The kernels for this process's GPU (or for Triton's interpreter).

    batch_invariant: a request's result is the same bit for bit whatever shares its batch, and
    however it is cut into chunks. Linear layers and attention are slower for it.
    """
    target = current_target()
    tiles = load_tiles(target)

    def pack_invariant(parts: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
        weight = dequantize(stack(parts))
        tile = tiles.matmul(weight.dtype)
        return partial(invariant_linear, weight=weight, bias=bias, tile=tile)

    attention = TritonAttention(tiles, batch_invariant=batch_invariant)
    return Kernels(
        name="triton",
        attention=attention,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary=rotary,
        gated_act=gated_act,
        pack_linear=pack_invariant if batch_invariant else reference.pack_linear,
        copy_blocks=copy_blocks,
        prepare_heads=attention.prepare_heads,
        sampling=SamplingKernels(draw, penalize, mask=mask),
        build=f"{triton.__version__} {target}",
        compiling=showing_progress,
    )


def flashinfer_kernels() -> Kernels:
    """The same, with FlashInfer's attention for long prompts. Raises ConfigError without it."""
    kernels = triton_kernels()
    assert isinstance(kernels.attention, TritonAttention)
    attention = FlashInferAttention(kernels.attention)
    version = getattr(attention.library, "__version__", "of unknown version")
    return replace(
        kernels,
        name="flashinfer",
        attention=attention,
        build=f"{kernels.build}, flashinfer {version}",
    )
