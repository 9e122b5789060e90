"""A long prompt that has begun, and short ones that come while it is prefilled."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock
from tests.scheduler.driver import shares, step
from tests.strategies import add_request, limits


class LongPrefill:
    """One long prompt that has begun; `step` checks what must hold whatever arrives."""

    def __init__(
        self, budget: int, num_tokens: int, scheduler_type: type[Scheduler], **others: Any
    ) -> None:
        self.budget = budget
        settings = limits(
            max_num_seqs=64,
            max_num_batched_tokens=budget,
            max_model_len=num_tokens + 2000,
            **others,
        )
        kv = KVCacheManager(num_tokens, 16, 0)  # room for whatever comes
        self.scheduler = scheduler_type(kv, settings, FakeClock())
        self.streams: set[str] = set()  # those that have a first token and more to come
        self.first_step: dict[str, int] = {}
        self.num_steps = 0
        self.scheduler.add(add_request("long", num_tokens, 2))
        self.step()

    @property
    def num_lacking(self) -> int:
        request = self.scheduler.roster.requests.get("long")
        known = request is not None and "long" not in self.first_step
        return request.num_uncomputed_tokens if request is not None and known else 0

    def step(self) -> None:
        before, streams = self.num_lacking, set(self.streams)
        lack_one = [r for r in self.scheduler.roster.running if r.num_uncomputed_tokens == 1]
        plan, deltas = step(self.scheduler)
        self.num_steps += 1
        given = shares(plan)
        assert streams <= given.keys(), "a stream that has begun must go on"
        if before > 2 * self.budget:  # it is longer than all that come
            fair = math.ceil((self.budget - len(lack_one)) / 2)
            assert given.get("long", 0) >= fair, (given, before)
        for delta in deltas:
            self.first_step.setdefault(delta.request_id, self.num_steps)
            self.streams.add(delta.request_id)
            if delta.finish_reason is not None:
                self.streams.discard(delta.request_id)
        used = sum(given.values())
        assert used == self.budget or not self.num_lacking, "nothing of a step is wasted"


def check_prefill_is_fair(rng: Random, *, scheduler_type: type[Scheduler] = Scheduler) -> None:
    """One newcomer gets its first token within a tenth of the prefill that is left, and delays it
    by no more; many share half of it; and those that are not so short keep to the order."""
    budget = rng.choice([16, 32, 100])
    num_tokens = budget * rng.randint(30, 60)
    policy = rng.choice(["fcfs", "fair", "priority"])
    load = LongPrefill(budget, num_tokens, scheduler_type, policy=policy)
    for _ in range(rng.randint(0, 10)):
        load.step()
    if rng.random() < 0.5:
        _one_newcomer(rng, load)
    else:
        _many_newcomers(rng, load)


def _one_newcomer(rng: Random, load: LongPrefill) -> None:
    left, began = load.num_lacking, load.num_steps
    others = [f"longer{i}" for i in range(rng.randint(0, 2))]
    for name in others:
        load.scheduler.add(add_request(name, left // 10, 2))
    load.scheduler.add(add_request("short", rng.randint(1, left // 20), rng.randint(1, 6)))
    while "long" not in load.first_step:
        load.step()
        early = load.first_step.keys() & others
        assert not early, f"{early} passed, though not so much shorter"
    alone = math.ceil(left / load.budget)
    assert load.first_step["short"] - began <= math.ceil(alone / 10), (left, load.budget)
    assert load.first_step["long"] - began <= 1.1 * alone + 1


def _many_newcomers(rng: Random, load: LongPrefill) -> None:
    alone = math.ceil(load.num_lacking / load.budget)
    began = load.num_steps
    while load.num_lacking > 2 * load.budget:  # longer than all that come
        for _ in range(rng.randint(0, 4)):
            length = rng.randint(1, max(2, rng.choice([load.budget // 4, 2 * load.budget])))
            name, priority = f"r{rng.random()}", rng.choice([-1, 0])
            load.scheduler.add(add_request(name, length, 9, priority=priority))
        load.step()
    urgent_streams = load.scheduler.limits.policy == "priority"  # which come before it
    assert urgent_streams or load.num_steps - began <= 2 * alone
