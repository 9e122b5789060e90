"""Everything at once, in any order: arrivals, aborts, deadlines, pins, live settings and failures
over the real core, under every policy, with the prefix cache and both ways of preemption."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve.messages import AbortRequests, AddRequest, Control, ControlResult, FinishReason
from serve.scheduler.invariants import check_scheduler
from tests.fakes import FakeClock, reference_completion
from tests.strategies import (
    VICTIMS,
    Arrival,
    Run,
    Workload,
    add_request,
    build,
    check_drained,
    limits,
    random_control,
)

LONGEST = 24
KEPT_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class EngineMachine(RuleBasedStateMachine):
    """What a client was told is always the beginning of its sequential answer."""

    run: Run

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        mode=st.sampled_from(["recompute", "swap", "auto"]),
        victim=st.sampled_from(VICTIMS),
        order=st.sampled_from(["decode-first", "prefill-first"]),
        aging_s=st.sampled_from([0.0, 2.0]),
        block_size=st.sampled_from([1, 4]),
        budget=st.integers(1, 24),
        depth=st.integers(1, 3),
        spare=st.integers(0, 6),
        caching=st.booleans(),
        guard=st.sampled_from([True, True, False]),
    )
    def start(
        self, policy: str, mode: str, victim: str, order: str, aging_s: float, block_size: int,
        budget: int, depth: int, spare: int, caching: bool, guard: bool,
    ) -> None:  # fmt: skip
        self.guard = guard
        self.workload = Workload(
            limits(
                policy=policy, preemption_mode=mode, preemption_victim=victim, step_order=order,
                priority_aging_s=aging_s, thrash_guard=guard, max_num_seqs=4,
                max_num_batched_tokens=budget, max_model_len=LONGEST,
            ),
            LONGEST // block_size + spare, block_size, 12, depth,
            enable_prefix_caching=caching,
        )  # fmt: skip
        self.run = self.build_run()
        self.run.executor.fail_on = lambda number, plan: self.fails_next and bool(plan.scheduled)
        self.fails_next = False
        self.arrivals: list[Arrival] = []
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.preemptions: dict[str, int] = {}
        self.num_steps = 0
        self.num_failures = 0

    def build_run(self) -> Run:
        return build(self.workload)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        more=st.integers(0, 10),
        stop=st.sampled_from([(), (3,), (1, 11, 21)]),
        priority=st.integers(-1, 1),
        client=st.sampled_from("ab"),
        weight=st.sampled_from([1.0, 3.0]),
        timeout_s=st.sampled_from([None, None, None, 2.0]),
    )
    def add(
        self, prompt: list[int], more: int, stop: tuple[int, ...], priority: int, client: str,
        weight: float, timeout_s: float | None,
    ) -> None:  # fmt: skip
        name = f"r{len(self.arrivals)}"
        plain = add_request(name, prompt, more, stop_token_ids=stop)
        message = AddRequest(
            name,
            prompt,
            plain.sampling,
            self.clock.now,
            priority=priority,
            client=client,
            weight=weight,
            timeout_s=timeout_s,
        )
        self.arrivals.append(Arrival(message, 0))
        self.got[name] = []
        self.run.core.handle(message)

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.got)))
        if name not in self.ended:
            self.aborted.add(name)
        self.run.core.handle(AbortRequests([name, name, "unknown"]))

    @precondition(lambda self: self.arrivals)
    @rule(rng=st.randoms(use_true_random=False))
    def control(self, rng: object) -> None:
        message = random_control(rng, 0, self.arrivals, 4)  # type: ignore[arg-type]
        self.run.core.handle(message)
        answer = self.run.outbox.sent[-1]
        assert isinstance(answer, ControlResult)
        assert (answer.value is None) == (answer.error is not None)

    @rule(seconds=st.floats(0.1, 3))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.run.core.has_work())
    @rule(fails=st.integers(0, 19).map(lambda n: n == 0))
    def step(self, fails: bool) -> None:
        self.fails_next = fails and self.num_failures < 2  # three in a row are another test
        self.num_failures += self.fails_next
        self.num_steps += 1
        for delta in self.run.core.step():
            name = delta.request_id
            assert name not in self.ended, f"{name} goes on after its end"
            assert name not in self.aborted, f"{name} goes on after its abort"
            self.got[name] += delta.token_ids
            if delta.times is not None:
                self.preemptions[name] = delta.times.num_preemptions
            if delta.finish_reason is not None:
                self.ended[name] = delta.finish_reason
        if self.run.executor.violations:
            raise self.run.executor.violations[0]
        self.fails_next = False

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "run"):
            return
        check_scheduler(self.run.scheduler)
        for arrival in self.arrivals:
            name = arrival.message.request_id
            wanted = self.wanted(arrival)
            assert self.got[name] == wanted[: len(self.got[name])], name
            if self.ended.get(name) in KEPT_WHOLE:
                assert self.got[name] == wanted, name
            if self.ended.get(name) is FinishReason.TIMEOUT:
                assert self.got[name] == [], f"{name} had begun"

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        for _ in range(self.most_steps()):
            if not self.run.core.has_work():
                break
            self.step(fails=False)
            self.clock.advance(0.25)
            self.holds()
        assert not self.run.core.has_work(), f"not done after {self.num_steps} steps"
        over = self.ended.keys() | self.aborted
        assert over == self.got.keys(), f"never answered: {self.got.keys() - over}"
        check_drained(self.run)
        self.forget_everything()
        if self.guard:
            most = self.most_preemptions()
            assert all(times <= most for times in self.preemptions.values()), self.preemptions

    def forget_everything(self) -> None:
        """Without pins every block is free."""
        core, kv = self.run.core, self.run.kv
        for pin_id in list(kv.prefixes.pins.by_id):
            core.handle(Control(0, "unpin", {"pin_id": pin_id}))
        assert (kv.num_blocks_free, kv.prefixes.num_pinned) == (kv.num_blocks, 0)
        core.handle(Control(0, "reset_prefix_cache"))
        assert kv.prefixes.num_blocks == 0
        check_scheduler(self.run.scheduler)

    def most_preemptions(self) -> int:
        """The headroom doubles up to the pool's size, and every other request may be more urgent
        under some policy."""
        return self.workload.num_blocks.bit_length() + 2 + len(self.arrivals)

    def most_steps(self) -> int:
        """Even if every request ran alone, a token a step, and from its beginning after every
        preemption; and one more of each to come back, to end and to be given up."""
        tokens = sum(
            len(a.message.prompt_token_ids) + (a.message.sampling.max_tokens or 0) + 3
            for a in self.arrivals
        )
        return (tokens + 3) * (1 + self.most_preemptions())

    def wanted(self, arrival: Arrival) -> list[int]:
        message = arrival.message
        return reference_completion(message.prompt_token_ids, message.sampling)

    @property
    def clock(self) -> FakeClock:
        clock = self.run.scheduler.clock
        assert isinstance(clock, FakeClock)
        return clock


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
