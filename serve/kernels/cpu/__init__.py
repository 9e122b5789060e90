"""Kernels for x86 CPUs (AVX2, AVX-512), written in C++.

Bits never depend on company: a token's result is the same alone, in any batch, at any chunking and
with any number of threads, because every sum runs in an order fixed by the row itself (tile.h,
attention.cpp).
"""

from __future__ import annotations

from pathlib import Path

from serve.kernels.base import Kernels
from serve.kernels.sampling import SamplingKernels


def cpu_kernels(
    num_threads: int | None = None,
    cache_dir: Path | None = None,
    quantization: str | None = None,
) -> Kernels:
    """Kernels on `num_threads` threads (default: one per core this process may use).

    `quantization` "int8" rounds the weights of linear layers; None keeps every bit.

    Compiles them at first use into `cache_dir` (default: in the cache folder). Raises
    ConfigError when this CPU or the lack of a compiler makes that impossible.
    """
    from serve.kernels.cpu.attention import CpuAttention
    from serve.kernels.cpu.decoder import DecoderFuser
    from serve.kernels.cpu.elementwise import RowKernels
    from serve.kernels.cpu.library import Library
    from serve.kernels.cpu.linear import LinearPacker
    from serve.kernels.cpu.panels import KEPT
    from serve.kernels.cpu.sampling import RowSampling
    from serve.kernels.reference import copy_blocks

    library = Library(num_threads, cache_dir)
    rows, sampling = RowKernels(library), RowSampling(library)
    return Kernels(
        name="cpu",
        attention=CpuAttention(library),
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        rotary=rows.rotary,
        gated_act=rows.gated_act,
        pack_linear=LinearPacker(library, quantization),
        copy_blocks=copy_blocks,
        fuse_decoder=DecoderFuser(library),
        sampling=SamplingKernels(
            sampling.draw, sampling.penalize, sampling.argmax, sampling.score, sampling.mask
        ),
        is_thread_invariant=True,
        keeps=KEPT,
        build=library.build,
    )
