"""The CPU kernels against torch's best, one thread each, on a small model's shapes.

    python -m benchmarks.kernels.cpu

Figures are CPU time of one thread, not wall time, and the contestants take turns, so a busy machine
disturbs the ratios little. Linear layers: all of a 135M model's, each in memory of its own, so that
weights come from memory as in a real step. Yardsticks: oneDNN with prepacked fp32 weights (the best
exact choice torch has), FBGEMM with fp16 weights, scaled_dot_product_attention on keys and values
that already lie contiguously, and sampling with torch's own operations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from serve.kernels.base import AttentionMetadata, Kernels
from serve.kernels.cpu import cpu_kernels
from serve.kernels.stored import Blocks, Dense

Run = Callable[[], object]

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
LAYER = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
SHAPES = LAYER * 30 + [(VOCAB, HIDDEN)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.cpu", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    kernels, rounding = (cpu_kernels(num_threads=1, quantization=q) for q in (None, "int8"))
    with torch.inference_mode():
        contestants = linear_contestants(kernels, rounding)
        for rows in options.rows:
            inputs = {depth: torch.randn(rows, depth) for depth in (HIDDEN, INTERMEDIATE)}
            runs = {name: _step(layers, inputs) for name, layers in contestants.items()}
            report(f"linear, {rows} rows", runs, options.repeats)
        for num_sequences, seq_len in [(1, 128), (32, 128), (32, 512)]:
            runs = attention_contestants(kernels, num_sequences, seq_len)
            report(f"attention, {num_sequences} x {seq_len}", runs, options.repeats)
        for name, runs in sampling_contestants(kernels, num_rows=32).items():
            report(f"{name}, 32 rows", runs, options.repeats)
    return 0


def linear_contestants(
    kernels: Kernels, rounding: Kernels
) -> dict[str, list[Callable[[Tensor], Tensor]]]:
    """Each one's 121 layers over random weights."""
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in SHAPES]
    reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    prepack, half = torch.ops.quantized.linear_prepack_fp16, torch.ops.quantized.linear_dynamic_fp16

    def onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
        packed = reorder(weight)
        return lambda x: multiply(x, packed, None, "none", [], "")

    def fbgemm(weight: Tensor) -> Callable[[Tensor], Tensor]:
        packed = prepack(weight, None)
        return lambda x: half(x, packed)

    return {
        "ours fp32": [kernels.pack_linear([Dense(weight)], None) for weight in weights],
        "ours fp16": [kernels.pack_linear([Dense(weight.half())], None) for weight in weights],
        "ours 4 bit": [kernels.pack_linear([_four_bits(weight)], None) for weight in weights],
        "ours int8": [rounding.pack_linear([Dense(weight)], None) for weight in weights],
        "oneDNN fp32": [onednn(weight) for weight in weights],
        "FBGEMM fp16": [fbgemm(weight) for weight in weights],
    }


def _four_bits(weight: Tensor) -> Blocks:
    """Rounded to GGUF blocks of 4 bits."""
    rounded = quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
    return Blocks("Q4_1", torch.from_numpy(rounded))


def _step(layers: Sequence[Callable[[Tensor], Tensor]], inputs: dict[int, Tensor]) -> Run:
    def run() -> None:
        for layer, (_, depth) in zip(layers, SHAPES, strict=True):
            layer(inputs[depth])

    return run


def attention_contestants(kernels: Kernels, num_sequences: int, seq_len: int) -> dict[str, Run]:
    """Decoding, blocks of 16 in random order."""
    num_blocks = -(-seq_len // 16)
    table = torch.randperm(num_sequences * num_blocks).int().view(num_sequences, num_blocks) + 1
    meta = AttentionMetadata(
        query_start_loc=torch.arange(num_sequences + 1, dtype=torch.int32),
        seq_lens=torch.full((num_sequences,), seq_len, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decode_rows=num_sequences,
        max_query_len=1,
        max_seq_len=seq_len,
        query_lens_host=[1] * num_sequences,
        seq_lens_host=[seq_len] * num_sequences,
    )
    kv = torch.randn(kernels.attention.kv_shape(table.numel() + 1, 16, KV_HEADS, HEAD_DIM))
    query = torch.randn(num_sequences, HEADS, HEAD_DIM)
    folded = query.view(num_sequences, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    key, value = torch.randn(2, num_sequences, KV_HEADS, seq_len, HEAD_DIM)
    return {
        "ours": lambda: kernels.attention.attend(query, kv, meta, scale=HEAD_DIM**-0.5),
        "sdpa": lambda: F.scaled_dot_product_attention(folded, key, value),
    }


def sampling_contestants(kernels: Kernels, num_rows: int) -> dict[str, dict[str, Run]]:
    """Argmax and draws over logits with a few likely tokens; torch's draws as they are often
    written, by softmax, sort and multinomial."""
    assert kernels.sampling is not None
    logits = torch.randn(num_rows, VOCAB) * 2.5
    logits[:, 7:10] += torch.tensor([20.0, 19.0, 18.0])
    keys = torch.randint(-(2**31), 2**31, (num_rows, 2), dtype=torch.int32)
    out = torch.empty(num_rows, dtype=torch.int64)
    draw, argmax = kernels.sampling.draw, kernels.sampling.argmax
    assert argmax is not None

    def controls(top_k: int, top_p: float) -> Tensor:
        return torch.tensor([[0.8, top_k, top_p, 0.0]]).repeat(num_rows, 1)

    plain, nucleus, top = controls(VOCAB, 2.0), controls(VOCAB, 0.9), controls(40, 2.0)
    return {
        "argmax": {"ours": lambda: argmax(logits, out), "torch": lambda: logits.argmax(-1)},
        "draw": {
            "ours": lambda: draw(logits, plain, keys),
            "torch": lambda: (logits / 0.8).softmax(-1).multinomial(1),
        },
        "top_p 0.9": {
            "ours": lambda: draw(logits, nucleus, keys),
            "torch": lambda: _sorted_nucleus(logits, 0.9),
        },
        "top_k 40": {
            "ours": lambda: draw(logits, top, keys),
            "torch": lambda: (logits / 0.8).topk(40).values.softmax(-1).multinomial(1),
        },
    }


def _sorted_nucleus(logits: Tensor, top_p: float) -> Tensor:
    probabilities, ids = (logits / 0.8).softmax(-1).sort(dim=-1, descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0.0
    return ids.gather(1, probabilities.multinomial(1))


def report(title: str, runs: dict[str, Run], repeats: int) -> None:
    """One line: milliseconds (median), and times the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            if repeat:  # the first round warms up
                seconds[name].append(time.thread_time() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians.values()))
    cells = [f"{name} {1e3 * s:.2f} ms ({s / first:.2f})" for name, s in medians.items()]
    sys.stdout.write(f"{title}: {', '.join(cells)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
