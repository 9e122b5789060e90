"""Work that never ends, and one request that must not wait for its end."""

from __future__ import annotations

import math
from random import Random

from serve.messages import AddRequest
from serve.scheduler.invariants import check_scheduler
from tests.fakes import FakeClock
from tests.strategies import Run, Workload, add_request, build, limits

TURN_S = 0.5
MOST_TOKENS = 12
"""Of one request, prompt and answer together: as many steps as it can take, alone."""


def check_nobody_starves(rng: Random, **types: type) -> Run:
    """Every turn another request comes that would be served first, until one that waits has been
    answered; or fails when that takes too many steps."""
    policy = rng.choice(["fcfs", "priority", "priority", "fair"])
    gap, aging_s = rng.randint(1, 3), rng.choice([1.0, 2.0])
    workload = Workload(
        limits(
            policy=policy,
            priority_aging_s=aging_s,
            max_num_seqs=rng.randint(1, 2),
            max_num_batched_tokens=rng.randint(2, 16),
            max_model_len=MOST_TOKENS,
            preemption_mode=rng.choice(["recompute", "swap"]),
        ),
        num_blocks=rng.randint(6, 9),
        block_size=2,
        num_host_blocks=rng.choice([0, 6]),
        depth=1,
    )
    run = build(workload, **types)
    clock = run.scheduler.clock
    assert isinstance(clock, FakeClock)
    # Those that come later are served later, once they are so much younger.
    num_before = 6 if policy != "priority" else math.ceil((gap + 1) * aging_s / TURN_S) + 6
    patience = MOST_TOKENS * (num_before + 2)
    for turn in range(patience):
        run.core.handle(_rival(rng, turn, clock.now))
        if turn == 4:
            one = add_request("one", 4, 4, arrival_time=clock.now, priority=gap)
            run.core.handle(one)
        if any(delta.finish_reason for delta in run.core.step() if delta.request_id == "one"):
            return run
        check_scheduler(run.scheduler)
        clock.advance(TURN_S)
    raise AssertionError(f"not answered after {patience} steps: {workload}, priority {gap}")


def _rival(rng: Random, turn: int, now: float) -> AddRequest:
    num_prompt = rng.randint(1, 6)
    message = add_request(f"r{turn}", num_prompt, rng.randint(2, 6), arrival_time=now)
    return AddRequest(
        message.request_id,
        message.prompt_token_ids,
        message.sampling,
        now,
        client="greedy",
    )
