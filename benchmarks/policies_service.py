"""Policies for who is served when: what a step is filled with, and the order of service."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from matplotlib.axes import Axes

from benchmarks.policies_simulated import TARGETS, Comparison, latency, outcome_of
from serve.simulate.figures import figures_of, spread
from serve.simulate.report import duration
from serve.simulate.settings import MachineConfig
from serve.simulate.simulation import Outcome
from serve.simulate.workload import SimRequest, Synthetic, draw

TARGET_ITL_MS = 30.0


def step_policies() -> Comparison:
    """Chats that stream, and now and then a very long prompt."""
    requests = mixed_load()
    policies: dict[str, dict[str, Any]] = {
        "chunked, 8192 tokens": {"max_num_batched_tokens": 8192},
        "chunked, 2048 tokens": {"max_num_batched_tokens": 2048},
        "chunked, 512 tokens": {"max_num_batched_tokens": 512},
        f"adaptive, {TARGET_ITL_MS:g} ms": {"target_itl_ms": TARGET_ITL_MS},
        "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 32_768},
        "prefill first": {"step_order": "prefill-first", "max_num_batched_tokens": 32_768},
    }
    rows, gaps = [], {}
    for name, settings in policies.items():
        outcome = outcome_of(requests, MachineConfig(), num_blocks=20_000, **settings)
        figures = figures_of(outcome, TARGETS)
        assert figures.itl is not None
        gaps[name] = inter_token_gaps(outcome)
        rows.append(
            (
                name,
                latency(figures, "itl", "p50"),
                latency(figures, "itl", "p99"),
                f"{figures.itl.p99 / TARGET_ITL_MS * 1e3:.1f} x",
                latency(figures, "itl", "max"),
                duration(longest_gap(outcome)),
                latency(figures, "ttft", "p50"),
                latency(figures, "ttft", "p99"),
                f"{figures.output_tokens_per_s:,.0f}",
            )
        )

    def draw_curves(axes: list[Axes]) -> None:
        (plot,) = axes
        for name, points in gaps.items():
            plot.loglog(
                [1e3 * gap for gap, _ in points], [share for _, share in points], label=name
            )
        plot.axvline(TARGET_ITL_MS, color="grey", linestyle=":")
        plot.set_xlabel("gap between tokens, ms")
        plot.set_ylabel("share of gaps that are longer")
        plot.legend()

    return Comparison(
        "steps",
        "What a step is filled with",
        "Six short chats a second, and every 1.2 s a prompt of 6,000 to 12,000 tokens. The "
        "longest gap is that of each request; p50 is over requests.",
        (
            "policy",
            "ITL p50",
            "ITL p99",
            "to the target",
            "ITL max",
            "longest gap, p50",
            "TTFT p50",
            "TTFT p99",
            "tokens/s",
        ),
        rows,
        1,
        draw_curves,
    )


def mixed_load() -> list[SimRequest]:
    """See `step_policies`: so many prompts that more than one gap in a hundred meets one."""
    chats = draw(
        Synthetic(num_requests=360, rate=6.0, prompt_len="lognormal:300:0.6", output_len="200")
    )
    rng = Random(7)
    documents = [
        SimRequest(1.2 * i, ((10_000 + i, rng.randint(6_000, 12_000)),), 100) for i in range(1, 50)
    ]
    return sorted([*chats, *documents], key=lambda request: request.arrival_s)


def longest_gap(outcome: Outcome) -> float:
    """Median over requests of the longest gap between two tokens."""
    found = spread([max(b - a for a, b in pairwise(h.token_times)) for h in outcome.histories])
    assert found is not None
    return found.p50


def inter_token_gaps(outcome: Outcome) -> list[tuple[float, float]]:
    """Gaps between tokens, shortest first, each with the share that are longer; of the shorter
    ones only some, which is enough for drawing."""
    gaps = sorted(b - a for h in outcome.histories for a, b in pairwise(h.token_times))
    kept = [*range(0, len(gaps) - 1000, 50), *range(max(0, len(gaps) - 1000), len(gaps))]
    return [(gaps[i], 1 - i / len(gaps)) for i in kept]


def service_orders() -> Comparison:
    """One client who sends everything at once, and one who now and then asks something."""
    requests = tenants()
    rows, curves = [], {}
    for policy in ("fcfs", "priority", "fair"):
        outcome = outcome_of(
            requests, MachineConfig(), num_blocks=4000, max_num_seqs=16, scheduling_policy=policy
        )
        for user in ("greedy", "modest"):
            waits = [h.ttft_s for h in outcome.histories if h.request.user == user]
            found = spread(waits)
            assert found is not None
            curves[policy, user] = sorted(waits)
            own = [h.token_times[-1] for h in outcome.histories if h.request.user == user]
            row = (policy, user, duration(found.p50), duration(found.p99), duration(max(own)))
            rows.append(row)

    def draw_curves(axes: list[Axes]) -> None:
        (plot,) = axes
        for (policy, user), waits in curves.items():
            share = [(i + 1) / len(waits) for i in range(len(waits))]
            style = "-" if user == "modest" else ":"
            plot.semilogx(waits, share, style, label=f"{policy}, {user} client")
        plot.set_xlabel("time to first token, s")
        plot.set_ylabel("share of requests")
        plot.legend()

    return Comparison(
        "order",
        "Who is served first",
        "One client sends 300 requests at once; another sends one every 0.5 s (with priority -1, "
        "which only the priority policy looks at). 16 requests run at a time.",
        ("policy", "client", "TTFT p50", "TTFT p99", "its last token after"),
        rows,
        1,
        draw_curves,
    )


def tenants() -> list[SimRequest]:
    """See `service_orders`."""
    greedy = [SimRequest(0.0, ((i, 400),), 200, user="greedy") for i in range(300)]
    modest = [
        SimRequest(0.5 * i, ((1000 + i, 200),), 100, priority=-1, user="modest") for i in range(60)
    ]
    return sorted([*greedy, *modest], key=lambda request: request.arrival_s)
