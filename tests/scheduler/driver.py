"""Answers a scheduler's plans with made-up tokens, step by step, without an engine."""

from __future__ import annotations

from collections.abc import Callable

from serve.kv_cache.manager import KVCacheManager
from serve.messages import TokenDelta
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import SchedulerOutput, StepResult
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.strategies import limits


def make_scheduler(
    *, num_blocks: int = 64, block_size: int = 4, num_host_blocks: int = 0, **limit: object
) -> Scheduler:
    """A scheduler with small defaults and a clock that stands still."""
    kv = KVCacheManager(num_blocks, block_size, num_host_blocks)
    return Scheduler(kv, limits(**limit), FakeClock())  # type: ignore[arg-type]


def step(scheduler: Scheduler, token_id: int = 1) -> tuple[SchedulerOutput, list[TokenDelta]]:
    """Schedule a step and retire it at once; everyone who samples gets `token_id`."""
    plan = scheduler.schedule()
    if not plan:
        return plan, []
    tokens = {entry.request_id: [token_id] for entry in plan.scheduled if entry.num_samples}
    deltas = scheduler.update(plan, StepResult(tokens))
    check_scheduler(scheduler)
    return plan, deltas


def run_until_done(
    scheduler: Scheduler,
    max_steps: int = 5000,
    after: Callable[[SchedulerOutput, list[TokenDelta]], None] = lambda plan, deltas: None,
) -> dict[str, list[int]]:
    """Step until nothing is left; returns every request's tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_work():
            return tokens
        plan, deltas = step(scheduler)
        for delta in deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        after(plan, deltas)
    raise AssertionError(f"not done after {max_steps} steps: {scheduler.stats()}")


def shares(plan: SchedulerOutput) -> dict[str, int]:
    """Tokens each request got in a plan."""
    return {entry.request_id: entry.num_tokens for entry in plan.scheduled}
