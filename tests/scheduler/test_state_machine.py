"""Arrivals, aborts, launches, results and failures in any order, over the real scheduler."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from serve.messages import FinishReason
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeExecutor, InjectedFailure, reference_completion
from tests.scheduler.driver import make_scheduler
from tests.strategies import add_request

MAX_DEPTH = 3


class SchedulerMachine(RuleBasedStateMachine):
    """Steps are launched and retired as the rules please; the fake device checks what they do."""

    scheduler: Scheduler
    executor: FakeExecutor

    @initialize(
        mode=st.sampled_from(["recompute", "swap"]),
        block_size=st.sampled_from([1, 4]),
        budget=st.integers(1, 24),
        caching=st.booleans(),
    )
    def start(self, mode: str, block_size: int, budget: int, caching: bool) -> None:
        num_blocks, host = 28 // block_size, 12
        self.scheduler = make_scheduler(
            num_blocks=num_blocks, block_size=block_size, num_host_blocks=host, max_num_seqs=4,
            max_num_batched_tokens=budget, max_model_len=24, preemption_mode=mode,
        )  # fmt: skip
        self.scheduler.kv.enable_prefix_caching = caching
        self.executor = FakeExecutor(num_blocks, block_size, host, 4, budget)
        self.executor.fail_on = lambda number, plan: number in self.to_fail
        self.to_fail: set[int] = set()
        self.launched: deque[tuple[int, SchedulerOutput, object]] = deque()
        self.num_launched = 0
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12), more=st.integers(0, 12))
    def add(self, prompt: list[int], more: int) -> None:
        message = add_request(f"r{len(self.wanted)}", prompt, more)
        self.wanted[message.request_id] = reference_completion(prompt, message.sampling)
        self.got[message.request_id] = []
        self.scheduler.add(message)

    @precondition(lambda self: self.scheduler.roster.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort([data.draw(st.sampled_from(sorted(self.scheduler.roster.requests)))])

    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.kv.prefixes.forget()

    @precondition(lambda self: len(self.launched) < MAX_DEPTH and self.scheduler.has_work())
    @rule(fails=st.integers(0, 15).map(lambda n: n == 0))
    def launch(self, fails: bool) -> None:
        plan = self.scheduler.schedule()
        if not plan:
            assert self.launched, "stuck: nothing is out and nothing can start"
            return
        if fails:
            self.to_fail.add(self.num_launched)
        self.launched.append((self.num_launched, plan, self.executor.forward(plan)))
        self.num_launched += 1

    @precondition(lambda self: self.launched)
    @rule()
    def retire(self) -> None:
        number, plan, pending = self.launched.popleft()
        try:
            result = pending.wait()  # type: ignore[attr-defined]
        except InjectedFailure:
            assert number in self.to_fail
            deltas = self.scheduler.fail(plan, "injected")
            assert all(delta.finish_reason is FinishReason.ERROR for delta in deltas)
            return
        for delta in self.scheduler.update(plan, result):
            self.got[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                assert self.got[delta.request_id] == self.wanted[delta.request_id]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        check_scheduler(self.scheduler)
        for name, tokens in self.got.items():
            assert tokens == self.wanted[name][: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not (self.scheduler.has_work() or self.launched):
                break
            if self.scheduler.has_work() and len(self.launched) < MAX_DEPTH:
                self.launch(fails=False)
            if self.launched:
                self.retire()
            self.holds()
        stats = self.scheduler.stats()
        assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
        assert not self.executor.rows


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
