"""The figures of a run: throughput, latency percentiles, goodput, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from serve.bench.load import LoadRun, RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values_s:
            return None
        ms = np.asarray(values_s) * 1e3
        p50, p90, p95, p99 = np.percentile(ms, [50, 90, 95, 99])
        figures = (ms.mean(), p50, p90, p95, p99, ms.max())
        return cls(*(round(float(figure), 3) for figure in figures))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Latencies and throughput are of completed requests."""

    completed: int
    failed: int
    errors: dict[str, int]  # text → how often
    duration_s: float
    prompt_tokens: int  # as the server counts them; 0 when it does not say
    cached_tokens: int
    output_tokens: int
    wrong_length: int  # requests that got another number of tokens than they asked for
    counted_by: list[str]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None
    goodput_limits_ms: dict[str, float]
    good_share: float | None  # of all requests, failed ones included
    goodput_per_s: float | None  # requests a second that keep the limits
    max_send_delay_ms: float  # how far the client itself fell behind
    client_cpu_s: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarize(run: LoadRun, limits_ms: Mapping[str, float] | None = None) -> Summary:
    """The figures of `run`; `limits_ms` (ttft, tpot, e2e) define goodput."""
    done = [record for record in run.records if record.error is None]
    limits = dict(limits_ms or {})
    good = sum(_keeps(record, limits) for record in done)
    output_tokens = sum(record.num_tokens for record in done)
    prompt_tokens = sum(record.num_prompt_tokens or 0 for record in done)
    duration = run.duration_s
    return Summary(
        completed=len(done),
        failed=len(run.records) - len(done),
        errors=dict(Counter(r.error for r in run.records if r.error is not None).most_common()),
        duration_s=round(duration, 4),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.num_cached_tokens or 0 for record in done),
        output_tokens=output_tokens,
        wrong_length=sum(record.num_tokens != record.asked_tokens for record in done),
        counted_by=sorted({record.counted_by for record in done}),
        requests_per_s=round(len(done) / duration, 4),
        output_tokens_per_s=round(output_tokens / duration, 3),
        total_tokens_per_s=round((output_tokens + prompt_tokens) / duration, 3),
        ttft_ms=Spread.of([record.ttft_s for record in done]),
        tpot_ms=Spread.of([tpot for record in done if (tpot := record.tpot_s) is not None]),
        itl_ms=Spread.of([gap for record in done for gap in record.gaps_s]),
        e2e_ms=Spread.of([record.e2e_s for record in done]),
        goodput_limits_ms=limits,
        good_share=good / len(run.records) if limits else None,
        goodput_per_s=good / duration if limits else None,
        max_send_delay_ms=round(max((_delay_s(r) for r in run.records), default=0.0) * 1e3, 3),
        client_cpu_s=round(run.client_cpu_s, 3),
    )


def _keeps(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Tokens that all came at once have no TPOT to miss."""
    figures = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(figures[name] * 1e3 <= limit for name, limit in limits_ms.items())


def _delay_s(record: RequestRecord) -> float:
    return record.sent_s - record.due_s
