"""`serve-llm bench throughput` and `latency`: the engine in this process, without HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console

from serve.bench.options import Lengths, OfflineOptions
from serve.bench.summary import Spread
from serve.bench.workload import MIN_TOKEN_ID, random_token_ids
from serve.llm import LLM
from serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts and how each is to be sampled."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def bench_throughput(options: OfflineOptions, settings: Mapping[str, Any]) -> int:
    """Tokens a second of a batch, all given at once: median over the repeats."""
    num_prompts = options.num_prompts or 64
    with LLM(**settings) as llm:
        runs = [_timed(llm, options, num_prompts, repeat) for repeat in range(options.repeats)]
    rates = [num_output / seconds for seconds, _, num_output in runs]
    totals = [(num_prompt + num_output) / seconds for seconds, num_prompt, num_output in runs]
    figures = {
        "prompts": num_prompts,
        "output_tokens_per_s": round(median(rates), 2),
        "output_tokens_per_s_min": round(min(rates), 2),
        "output_tokens_per_s_max": round(max(rates), 2),
        "total_tokens_per_s": round(median(totals), 2),
        "requests_per_s": round(median(num_prompts / run[0] for run in runs), 3),
    }
    return _finish(figures, options)


def bench_latency(options: OfflineOptions, settings: Mapping[str, Any]) -> int:
    """Seconds from giving a batch to having all of it."""
    num_prompts = options.num_prompts or 1
    with LLM(**settings) as llm:
        seconds = [
            _timed(llm, options, num_prompts, repeat)[0] for repeat in range(options.repeats)
        ]
    spread = Spread.of(seconds)
    assert spread is not None
    figures = {"prompts": num_prompts} | {
        f"latency_ms_{name}": value for name, value in asdict(spread).items()
    }
    return _finish(figures, options)


def make_batch(options: OfflineOptions, num_prompts: int, seed: int, vocab_size: int) -> Batch:
    """Random prompts; another seed for each repeat, or the prefix cache would answer."""
    rng = Random(seed)
    input_lens = Lengths.parse(options.input_len, "input-len")
    output_lens = Lengths.parse(options.output_len, "output-len")
    above = max(vocab_size, MIN_TOKEN_ID + 1)
    shift = MIN_TOKEN_ID if vocab_size <= MIN_TOKEN_ID else 0  # tiny vocabularies start at 0
    prompts, sampling = [], []
    for _ in range(num_prompts):
        token_ids = random_token_ids(rng, input_lens.draw(rng), above)
        prompts.append([(token_id - shift) % vocab_size for token_id in token_ids])
        sampling.append(
            SamplingParams(max_tokens=output_lens.draw(rng), temperature=0.0, ignore_eos=True)
        )
    return Batch(prompts, sampling)


def _timed(
    llm: LLM, options: OfflineOptions, num_prompts: int, repeat: int
) -> tuple[float, int, int]:
    """(seconds, prompt tokens, output tokens) of one run; the first one is warmed up before."""
    if repeat == 0:
        for warmup in range(options.warmups):
            batch = make_batch(options, num_prompts, -1 - warmup, llm.ready.vocab_size)
            llm.generate(batch.prompts, batch.sampling)
    batch = make_batch(options, num_prompts, options.workload_seed + repeat, llm.ready.vocab_size)
    begin = time.perf_counter()
    outputs = llm.generate(batch.prompts, batch.sampling)
    seconds = time.perf_counter() - begin
    return seconds, batch.num_prompt_tokens, sum(len(output.token_ids) for output in outputs)


def _finish(figures: Mapping[str, object], options: OfflineOptions) -> int:
    console = Console()
    for name, value in figures.items():
        console.print(f"{name.replace('_', ' '):<28}{value:>14}", highlight=False)
    if options.output_json is not None:
        _write(options.output_json, {"options": asdict(options), "figures": figures})
    return 0


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, default=str, indent=2) + "\n", encoding="utf-8")
