"""A whole model under every way of running it: what must be equal is compared bit for bit.

In batch-invariant mode graphs, overlap, preemption and company may change nothing. This is what
shows a missing wait between streams, a block handed out too early or a number left in a recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.gpu_engine import Shape, engine, request
from benchmarks.gpu_plan import Row
from serve.config import CacheConfig, Count, EngineConfig
from serve.engine.core import EngineCore

Answers = dict[str, list[tuple[int, float]]]
"""By request: its tokens with their logprobs."""

REFERENCE_BOUND = 0.02
"""Of a first token's logprob, in fp32, over four layers of matmuls in another order."""


@dataclass(frozen=True)
class Setting:
    """A way to run the same requests."""

    name: str
    graphs: bool = True
    depth: int = 2
    preemption: Literal["recompute", "swap"] | None = None
    e4m3: bool = False
    fp32: bool = False
    reference: bool = False  # plain torch, whose bits depend on the batch


SETTINGS = (
    Setting("as it comes"),
    Setting("without graphs", graphs=False),
    Setting("one step at a time", depth=1),
    Setting("preempted by recomputing", preemption="recompute"),
    Setting("preempted by swapping", preemption="swap"),
)
SETTINGS_E4M3 = tuple(
    replace(setting, name=f"e4m3 cache, {setting.name}", e4m3=True)
    for setting in (SETTINGS[0], SETTINGS[1], SETTINGS[4])
)


def exactness_rows(shape: Shape) -> Iterator[Row]:
    """Each setting beside the first of its kind, and that beside plain torch."""
    small = shape.exactness()
    for group in (SETTINGS, SETTINGS_E4M3):
        wanted: Answers = {}
        for setting in group:
            found, preemptions = answers(small, setting)
            wanted = wanted or found
            equal = sum(found[name] == wanted[name] for name in wanted)
            happened = preemptions > 0 or setting.preemption is None
            yield {
                "setting": setting.name,
                "requests": len(wanted),
                "equal bits": equal,
                "preemptions": preemptions,
                "passed": equal == len(wanted) and happened,
            }
    ours, _ = answers(small, Setting("ours", fp32=True))
    theirs, _ = answers(small, Setting("plain torch", fp32=True, reference=True))
    farthest = max(abs(ours[name][0][1] - theirs[name][0][1]) for name in ours)
    yield {
        "setting": "fp32 beside plain torch",
        "requests": len(ours),
        "largest difference": farthest,
        "passed": farthest <= REFERENCE_BOUND,
    }


def answers(shape: Shape, setting: Setting) -> tuple[Answers, int]:
    """What every request got, and how many preemptions that took."""
    dtype: Literal["float32", "auto"] = "float32" if setting.fp32 else "auto"
    with engine(shape, settings_for(shape, setting), dtype=dtype) as core:
        core.depth = setting.depth
        for number in range(shape.num_requests):
            message = request(f"r{number}", 5 + 7 * number % shape.prompt_len, shape.completion_len)
            sampling = replace(
                message.sampling,
                temperature=float(number % 2),
                top_p=1.0 if number % 3 else 0.9,
                seed=number,
                logprobs=0,
            )
            core.handle(replace(message, sampling=sampling))
        found = _scores(core)
        stats = core.scheduler.stats()
    return found, stats.total_preemptions_recompute + stats.total_preemptions_swap


def settings_for(shape: Shape, setting: Setting) -> EngineConfig:
    """A pool for all requests; or one that is too small, so that they preempt each other."""
    base = shape.settings
    lengths = shape.num_requests * -(-(shape.prompt_len + shape.completion_len) // 16)
    few = max(-(-(shape.prompt_len + shape.completion_len) // 16) + 2, lengths // 6)
    device = replace(
        base.device,
        enforce_eager=not setting.graphs,
        cudagraph_capture_sizes=(1, 4, shape.num_requests),
        batch_invariant=not setting.reference,
    )
    if setting.reference:
        device = replace(device, attention_backend="reference")
    return replace(
        base,
        device=device,
        cache=CacheConfig(
            num_gpu_blocks_override=few if setting.preemption else lengths + 8,
            swap_space=1.0,
            kv_cache_dtype="fp8" if setting.e4m3 else "auto",
            enable_prefix_caching=False,
        ),
        scheduler=replace(
            base.scheduler,
            preemption_mode=setting.preemption or "recompute",
            max_num_seqs=shape.num_requests,
            max_num_batched_tokens=Count(shape.step_budget),
        ),
    )


def _scores(core: EngineCore) -> Answers:
    found: Answers = {}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            scores: Sequence = delta.logprobs or []  # type: ignore[type-arg]
            found.setdefault(delta.request_id, []).extend((s.token_id, s.logprob) for s in scores)
    return found
