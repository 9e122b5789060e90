"""The whole engine under load, and a request's bits alone and in company."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.gpu_engine import Shape, engine, finish, request
from benchmarks.gpu_plan import Row
from serve.config import Count
from serve.engine.core import EngineCore
from serve.messages import AddRequest

_LONG_PROMPTS = 6
_STEPS_BETWEEN = 8


def load_rows(shape: Shape) -> Iterator[Row]:
    """Tokens per second with all requests given at once, and how long running requests wait for
    their next token while long prompts come in: with prompts in chunks and whole, in steps of the
    same budget."""
    for chunked in (True, False):
        scheduler = replace(
            shape.settings.scheduler,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=shape.chunk if chunked else 0,
            max_num_batched_tokens=Count(shape.step_budget),
        )
        with engine(shape, replace(shape.settings, scheduler=scheduler)) as core:
            gaps = _gaps_under_long_prompts(core, shape)
            started = time.perf_counter()
            for number in range(shape.num_requests):
                core.handle(request(f"r{number}", shape.prompt_len, shape.completion_len, number))
            generated = sum(len(tokens) for tokens in finish(core).values())
            seconds = time.perf_counter() - started
        yield {
            "chunked": chunked,
            "tokens/s": generated / seconds,
            "median gap ms": statistics.median(gaps) * 1e3,
            "p99 gap ms": gaps[int(0.99 * len(gaps))] * 1e3,
        }


def _gaps_under_long_prompts(core: EngineCore, shape: Shape) -> list[float]:
    """Seconds between tokens of decoding requests, ascending; a long prompt joins every few
    steps."""
    names = [f"short{number}" for number in range(shape.decode_batches[1])]
    for number, name in enumerate(names):
        core.handle(request(name, 8, shape.completion_len, seed=number))
    last: dict[str, float] = {}
    gaps, step = [], 0
    while core.has_work():
        if step % _STEPS_BETWEEN == 0 and step < _STEPS_BETWEEN * _LONG_PROMPTS:
            core.handle(request(f"long{step}", shape.long_prompt_len, 1, seed=1000 + step))
        for delta in core.step():
            if delta.request_id in names and delta.token_ids:
                now = time.perf_counter()
                gaps += [now - last[delta.request_id]] if delta.request_id in last else []
                last[delta.request_id] = now
        step += 1
    return sorted(gaps)


def invariance_rows(shape: Shape) -> Iterator[Row]:
    """Whether a request's tokens and logprobs are the same bits alone and among others."""
    settings = replace(shape.settings, device=replace(shape.settings.device, batch_invariant=True))
    with engine(shape, settings) as core:
        alone = _scores(core, shape, company=0)
        among = _scores(core, shape, company=shape.company)
    yield {
        "company": shape.company,
        "tokens": len(alone),
        "equal bits": sum(a == b for a, b in zip(alone, among, strict=True)),
        "passed": alone == among,
    }


def _scores(core: EngineCore, shape: Shape, company: int) -> Sequence[tuple[int, float]]:
    core.handle(_scored(request("one", shape.prompt_len, shape.completion_len, seed=5)))
    for number in range(company):
        core.handle(request(f"r{number}", shape.prompt_len // 2 + number, 16, seed=number))
    found = []
    while core.has_work():
        for delta in core.step():
            if delta.request_id == "one":
                scores = delta.logprobs or []
                found += [(s.token_id, s.logprob) for s in scores]
    core.scheduler.kv.prefixes.forget()
    return found


def _scored(message: AddRequest) -> AddRequest:
    return replace(message, sampling=replace(message.sampling, logprobs=0))
