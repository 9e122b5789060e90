"""How near the engine comes to what this machine can do, and where the rest goes.

    python -m benchmarks.roofline --model DIR

For each load the floor is the least time in which the machine could read every weight once a step
(measured bandwidth) and do the multiplications of every token (measured fp32 GEMM rate), whichever
is longer, step by step as a continuous batcher makes them. Our time is the engine's in this
process, without HTTP; `--http` also runs our server and shows what HTTP adds.

The split times calls inside a step: linear layers, attention with its cache writes, norms and the
other small kernels, sampling, the scheduler; what is left is Python between them and building
inputs. Timers cost about a microsecond a call, so shares come from a run of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks import loads, machine
from benchmarks.engine_loop import EngineLoop, start_engine
from benchmarks.machine import Rates
from benchmarks.servers import RunningServer, ServerCommand, end_on_sigterm, free_port
from serve.bench.options import Lengths
from serve.bench.workload import random_token_ids
from serve.kernels.base import Kernels, PackedLinear
from serve.kernels.cpu.linear import CpuLinear
from serve.kernels.stored import StoredMatrix, dequantize, stack
from serve.llm import engine_config
from serve.worker.sampling.sampler import Sampler

HERE = Path(__file__).parent
LOADS = "1,2,3,4"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed weight: its shape, and its bytes as the kernels hold them."""

    outputs: int
    inputs: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a step must read and do."""

    weight_bytes: int  # all matrices once, as the kernels hold them
    flop_per_token: float  # layers
    flop_per_sample: float  # the head


@dataclass(slots=True)
class Stopwatch:
    """Seconds by kind of work, taken around calls that never nest."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def around(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, timed."""
        seconds = self.seconds

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return run(*arguments, **named)
            finally:
                seconds[kind] += time.perf_counter() - begin

        return timed


class TimedAttention:
    """An attention backend whose work is timed."""

    def __init__(self, inner: Any, watch: Stopwatch) -> None:
        self.name, self.limits, self.kv_shape = inner.name, inner.limits, inner.kv_shape
        self.attend = watch.around("attention", inner.attend)
        self.write_kv = watch.around("attention", inner.write_kv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    end_on_sigterm()
    chosen = [
        loads.smaller(load) if options.smoke else load for load in loads.find_loads(options.loads)
    ]
    settings = {"dtype": options.dtype, "quantization": options.quantization}
    config = engine_config(
        model=str(options.model), max_model_len="2048", enable_prefix_caching=False, **settings
    )

    matrices: list[Matrix] = []
    watch = Stopwatch()
    plain = start_engine(config, options.model, kernels=lambda k: _noting_matrices(k, matrices))
    cost = model_cost(matrices)
    timed = start_engine(config, options.model, kernels=lambda k: timed_kernels(k, watch))
    report: dict[str, Any] = {
        "command": "python -m benchmarks.roofline " + " ".join(argv or sys.argv[1:]),
        "machine": machine.describe(),
        "model": str(options.model),
        **settings,
        "kernels": plain.ready.attention_backend,
        "weight_bytes": cost.weight_bytes,
        "loads": [],
    }
    for load in chosen:
        report["loads"].append(one_load(load, plain, timed, watch, cost, options.repeats))
    plain.close()
    timed.close()
    if options.http:
        add_http(report, chosen, options)
    table = markdown(report)
    print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "roofline.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "roofline.md").write_text(table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.roofline", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder or .gguf file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8"], help="of linear layers, as for serve")
    parser.add_argument("--loads", default=LOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="also through our server")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only shows that it runs")
    return parser.parse_args(argv)


def _noting_matrices(kernels: Kernels, matrices: list[Matrix]) -> Kernels:
    """Kernels that write down every matrix they pack."""

    def pack(parts: Sequence[StoredMatrix], bias: Any) -> PackedLinear:
        packed = kernels.pack_linear(parts, bias)
        held = packed.panels.data if isinstance(packed, CpuLinear) else dequantize(stack(parts))
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        matrices.append(Matrix(outputs, inputs, held.nbytes))
        return packed

    return replace(kernels, pack_linear=pack)


def timed_kernels(kernels: Kernels, watch: Stopwatch) -> Kernels:
    """Kernels whose calls are timed by kind."""

    def pack(parts: Sequence[StoredMatrix], bias: Any) -> PackedLinear:
        return watch.around("linear", kernels.pack_linear(parts, bias))

    small = ("rms_norm", "add_rms_norm", "rotary", "gated_act")
    return replace(
        kernels,
        attention=TimedAttention(kernels.attention, watch),
        pack_linear=pack,
        fuse_decoder=None,  # in one call there is nothing to time apart
        **{name: watch.around("norms and others", getattr(kernels, name)) for name in small},
    )


def model_cost(matrices: Sequence[Matrix]) -> ModelCost:
    """From the packed matrices; the head is the one with most outputs (the vocabulary)."""
    head = max(matrices, key=lambda matrix: matrix.outputs)
    elements = sum(matrix.outputs * matrix.inputs for matrix in matrices)
    head_elements = head.outputs * head.inputs
    return ModelCost(
        weight_bytes=sum(matrix.num_bytes for matrix in matrices),
        flop_per_token=2.0 * (elements - head_elements),
        flop_per_sample=2.0 * head_elements,
    )


def floor_s(steps: Sequence[tuple[int, int]], cost: ModelCost, rates: Rates) -> float:
    """Least seconds for steps of (tokens, samples): each as long as its reads or its work."""
    reading = cost.weight_bytes / (rates.read_gb_s * 1e9)
    total = 0.0
    for num_tokens, num_samples in steps:
        flop = num_tokens * cost.flop_per_token + num_samples * cost.flop_per_sample
        total += max(reading, flop / (rates.gemm_gflop_s * 1e9))
    return total


def one_load(
    load: loads.NamedLoad,
    plain: EngineLoop,
    timed: EngineLoop,
    watch: Stopwatch,
    cost: ModelCost,
    repeats: int,
) -> dict[str, Any]:
    """The run with the median share of its own floor, and the split of a timed run."""
    runs = [(machine.measure_rates(), plain.run(batches(load, seed))) for seed in range(repeats)]
    runs.sort(key=lambda run: floor_s(run[1].steps, cost, run[0]) / run[1].seconds)
    rates, median = runs[len(runs) // 2]
    floor = floor_s(median.steps, cost, rates)
    watch.seconds.clear()
    with mock.patch.object(Sampler, "sample", watch.around("sampling", Sampler.sample)):
        split_run = timed.run(batches(load, repeats))
    split = dict(watch.seconds) | {"scheduler": split_run.scheduler_s}
    split["Python and inputs"] = split_run.seconds - sum(split.values())
    return {
        "load": load.name,
        "about": load.about,
        **rates.as_dict(),
        "steps": len(median.steps),
        "seconds": median.seconds,
        "floor_s": floor,
        "share_of_floor": floor / median.seconds,
        "tokens_per_s": median.num_output_tokens / median.seconds,
        "split": {kind: seconds / split_run.seconds for kind, seconds in split.items()},
    }


def batches(load: loads.NamedLoad, seed: int) -> list[list[tuple[list[int], int]]]:
    """The load's requests as (prompt, output length), grouped by what is open at once."""
    workload, rng = load.workload, Random(seed)
    input_lens = Lengths.parse(workload.input_len, "input-len")
    output_lens = Lengths.parse(workload.output_len, "output-len")
    requests = [
        (random_token_ids(rng, input_lens.draw(rng), 30000), output_lens.draw(rng))
        for _ in range(workload.num_prompts)
    ]
    if load.arrivals.max_concurrency == 1:
        return [[request] for request in requests]
    return [requests]


def add_http(
    report: dict[str, Any], chosen: Sequence[loads.NamedLoad], options: argparse.Namespace
) -> None:
    """What our server reaches on the same loads, as a share of the engine alone."""
    port = free_port()
    command = ServerCommand(
        name="roofline",
        command=(
            *(sys.executable, "-m", "serve.cli", "serve", str(options.model), "--dtype"),
            *(options.dtype, "--max-model-len", "2048", "--served-model-name", "smollm2"),
            *(("--quantization", options.quantization) if options.quantization else ()),
            *("--disable-log-requests", "--port", str(port)),
        ),
    )
    with RunningServer(command, port, options.out / "logs") as server:
        loads.warm_up(server, seed=1)
        for load, row in zip(chosen, report["loads"], strict=True):
            seeds = range(10, 10 + options.repeats)
            rates = [loads.run(server, load, s).summary.output_tokens_per_s for s in seeds]
            row["http_tokens_per_s"] = statistics.median(rates)
            row["http_share"] = row["http_tokens_per_s"] / row["tokens_per_s"]


def markdown(report: dict[str, Any]) -> str:
    """Floors and shares, then the split."""
    about = report["machine"]
    kinds = [
        "linear",
        "attention",
        "norms and others",
        "sampling",
        "scheduler",
        "Python and inputs",
    ]
    lines = [
        f"`{report['command']}`, {about['date']}, {about['cpu']}, {about['cores']} cores; "
        f"{report['weight_bytes'] / 1e6:.0f} MB of weights, {report['kernels']} kernels.",
        "",
        "| load | GB/s read | GEMM GFLOP/s | floor s | ours s | share | tok/s | over HTTP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["loads"]:
        http = (
            f"{row['http_tokens_per_s']:.0f} ({row['http_share']:.0%})"
            if "http_share" in row
            else "–"
        )
        lines.append(
            f"| {row['load']} | {row['read_gb_s']:.1f} | {row['gemm_gflop_s']:.0f} "
            f"| {row['floor_s']:.2f} | {row['seconds']:.2f} | {row['share_of_floor']:.0%} "
            f"| {row['tokens_per_s']:.0f} | {http} |"
        )
    lines += ["", "| load | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for row in report["loads"]:
        cells = [f"{row['split'].get(kind, 0.0):.0%}" for kind in kinds]
        lines.append(f"| {row['load']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
