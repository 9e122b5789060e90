"""What a simulation is judged by: latencies, throughput, goodput, and what preemption cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from serve.simulate.simulation import History, Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request must keep to count as good."""

    ttft_s: float
    tpot_s: float

    def met_by(self, history: History) -> bool:
        """Whether a finished request kept both."""
        tpot = history.tpot_s
        return history.ttft_s <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One simulation in numbers. Spreads are None when there is nothing to measure."""

    num_finished: int
    num_refused: int
    duration_s: float
    output_tokens_per_s: float
    goodput_per_s: float  # requests per second that met the targets
    good_share: float  # of all requests, refused ones included
    queue: Spread | None  # from arrival to the first step
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    num_steps: int
    busy_share: float
    kv_use: float
    max_kv_use: float
    preemptions_recompute: int
    preemptions_swap: int
    tokens_recomputed: int
    blocks_swapped: int
    max_preemptions: int  # of one request
    cached_share: float  # prompt tokens found in the prefix cache


def figures_of(outcome: Outcome, targets: Targets) -> Figures:
    """Judge a simulation."""
    finished = [h for h in outcome.histories if h.refusal is None]
    stats = outcome.stats
    good = sum(targets.met_by(history) for history in finished)
    duration = max(outcome.end_s, 1e-12)
    prompt_tokens = sum(h.request.prompt_len for h in finished)
    return Figures(
        num_finished=len(finished),
        num_refused=len(outcome.histories) - len(finished),
        duration_s=outcome.end_s,
        output_tokens_per_s=sum(len(h.token_times) for h in finished) / duration,
        goodput_per_s=good / duration,
        good_share=good / max(1, len(outcome.histories)),
        queue=spread([_queue_s(h) for h in finished]),
        ttft=spread([h.ttft_s for h in finished]),
        tpot=spread([h.tpot_s for h in finished if h.tpot_s is not None]),
        itl=spread([b - a for h in finished for a, b in pairwise(h.token_times)]),
        e2e=spread([h.token_times[-1] - h.request.arrival_s for h in finished]),
        num_steps=outcome.num_steps,
        busy_share=outcome.busy_s / duration,
        kv_use=outcome.kv_use,
        max_kv_use=outcome.max_kv_use,
        preemptions_recompute=stats.total_preemptions_recompute,
        preemptions_swap=stats.total_preemptions_swap,
        tokens_recomputed=stats.total_preemption_tokens_recomputed,
        blocks_swapped=stats.total_preemption_blocks_swapped,
        max_preemptions=max((h.num_preemptions for h in finished), default=0),
        cached_share=sum(h.num_cached_tokens for h in finished) / max(1, prompt_tokens),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Quantiles by the nearest-rank rule: each is a value that occurred."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (ordered[math.ceil(q * len(ordered)) - 1] for q in (0.5, 0.9, 0.99))
    return Spread(p50, p90, p99, ordered[-1])


def _queue_s(history: History) -> float:
    assert history.first_scheduled_s is not None
    return history.first_scheduled_s - history.request.arrival_s
