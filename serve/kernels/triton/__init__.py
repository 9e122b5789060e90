"""The GPU's operations, as Triton kernels. Importing this package needs Triton, but no GPU."""

from __future__ import annotations

from serve.kernels import reference
from serve.kernels.base import Kernels
from serve.kernels.triton.backend import TritonAttention
from serve.kernels.triton.tiles import current_target, load_tiles


def triton_kernels(*, batch_invariant: bool = False) -> Kernels:
    """The kernels for this process's GPU (or for Triton's interpreter).

    batch_invariant: a request's result is the same bit for bit whatever shares its batch.
    """
    return Kernels(
        name="triton",
        attention=TritonAttention(load_tiles(current_target()), batch_invariant=batch_invariant),
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        rotary=reference.rotary,
        gated_act=reference.gated_act,
        pack_linear=reference.pack_linear,
        copy_blocks=reference.copy_blocks,
    )
