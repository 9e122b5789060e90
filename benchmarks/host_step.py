"""Host time of a mixed step: what Python and Triton do for an 8B Llama's 32 layers.

    TRITON_INTERPRET=0 python -m benchmarks.host_step

No GPU is needed or used: launches end where Triton would call the driver (about 1 to 2 us each),
and linear layers only make their result (torch's own call, some 5 us each, comes on top).

On one EPYC core shared with others, in ms: with Triton's own call for each launch and everything
worked out anew in every layer, then as it is.

    256 decodes                    6.3   3.1
    64 decodes, 512 of a prompt    6.6   3.2
    4 decodes, 128 of a prompt     7.8   3.0
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from serve.kernels.base import (
    AttentionMetadata,
    DecoderParts,
    ForwardContext,
    GatedParts,
    LayerParts,
    PackedLinear,
)
from serve.kernels.triton import triton_kernels
from serve.models.layers import LayerByLayer
from tests.kernels import fake_gpu

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDE = 32, 32, 8, 128, 4096, 14336
STEPS = {
    "256 decodes": ([1] * 256, [1024] * 256),
    "64 decodes, 512 of a prompt": ([1] * 64 + [512], [1024] * 64 + [512]),
    "4 decodes, 128 of a prompt": ([1] * 4 + [128], [8000] * 4 + [128]),
}


def linear(out: int) -> PackedLinear:
    return lambda x: torch.empty((x.shape[0], out), dtype=x.dtype)


def decoder() -> DecoderParts:
    """Shapes of Llama 3 8B, without its weights."""
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    layer = LayerParts(
        qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM),
        output=linear(HIDDEN),
        mlp=GatedParts(linear(2 * WIDE), linear(HIDDEN)),
        before_attention=norm,
        query_norm=None,
        key_norm=None,
        after_attention=None,
        before_mlp=norm,
        after_mlp=None,
        window=None,
        rope=0,
    )
    return DecoderParts(
        [layer] * LAYERS, norm, HEADS, KV_HEADS, HEAD_DIM, "silu", 1e-5, HEAD_DIM**-0.5, None
    )


def metadata(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    columns = -(-max(seq_lens) // 16)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros((len(seq_lens), columns), dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        num_decode_rows=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


@torch.inference_mode()
def milliseconds(query_lens: list[int], seq_lens: list[int], repeats: int = 20) -> float:
    """Processor time of a step's 32 layers, the least of so many runs. Its metadata is new each
    time, as it is while serving."""
    kernels = triton_kernels()
    stack = LayerByLayer(decoder(), kernels)
    kv = torch.zeros(kernels.attention.kv_shape(2, 16, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    tokens = sum(query_lens)
    residual = torch.empty((tokens, HIDDEN), dtype=torch.bfloat16)
    positions = torch.zeros(tokens, dtype=torch.int64)
    rope: tuple[Tensor, Tensor] = (torch.zeros(8, HEAD_DIM), positions)
    times = []
    for _ in range(repeats + 1):
        meta = metadata(query_lens, seq_lens)
        context = ForwardContext([kv] * LAYERS, meta, positions)
        started = time.thread_time()
        stack(residual, [rope], context)
        times.append(time.thread_time() - started)
    return min(times) * 1e3


def main() -> None:
    fake_gpu.install()
    for name, step in STEPS.items():
        print(f"{name:<30}{milliseconds(*step):8.1f} ms")


if __name__ == "__main__":
    main()
