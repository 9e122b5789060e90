"""Random workloads for the engine, and the drive that runs them through the real core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from serve.engine.core import EngineCore
from serve.engine.grammar.grammars import Grammars
from serve.kv_cache.block_table import num_blocks_for
from serve.kv_cache.manager import KVCacheManager
from serve.messages import AbortRequests, AddRequest, Control, FinishReason, ToEngine
from serve.sampling_params import SamplingParams
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.scheduler import Scheduler
from tests.fakes import (
    VOCAB_SIZE,
    FakeClock,
    FakeExecutor,
    FakeInbox,
    FakeOutbox,
    reference_completion,
)

VICTIMS = ("last-admitted", "least-progress", "most-blocks", "cheapest")


@dataclass(frozen=True)
class Arrival:
    """A request, the engine turn in which it arrives, and the one in which it is aborted."""

    message: AddRequest
    turn: int
    abort_turn: int | None = None


@dataclass(frozen=True)
class Workload:
    """Everything a run depends on."""

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    num_host_blocks: int
    depth: int
    arrivals: list[Arrival] = field(default_factory=list)
    enable_prefix_caching: bool = False
    controls: list[tuple[int, Control]] = field(default_factory=list)  # by turn

    @property
    def max_pinned_blocks(self) -> int:
        """What the longest request leaves."""
        return self.num_blocks - num_blocks_for(self.limits.max_model_len, self.block_size)


def add_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int,
    *,
    arrival_time: float = 0.0,
    priority: int = 0,
    **sampling: object,
) -> AddRequest:
    """An AddRequest; an int prompt is that many distinct-looking tokens."""
    if isinstance(prompt, int):
        prompt = [(7 * i + len(request_id)) % VOCAB_SIZE for i in range(prompt)]
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
        arrival_time=arrival_time,
        priority=priority,
    )


def limits(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    **others: object,
) -> SchedulerLimits:
    """SchedulerLimits with small defaults."""
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **others,  # type: ignore[arg-type]
    )


def random_workload(rng: Random) -> Workload:
    """Small pools, small budgets, many requests: every kind of shortage, often.

    The pool holds the longest request and little more, so that two of them collide.
    """
    block_size = rng.choice([1, 2, 3, 4, 16])
    longest = rng.randint(2, 48)
    num_blocks = num_blocks_for(longest, block_size) + rng.randint(0, 6)
    chunked = rng.random() < 0.6
    max_num_seqs = rng.randint(1, 6)
    arrivals = [_random_arrival(rng, f"r{i}", longest) for i in range(rng.randint(1, 8))]
    return Workload(
        limits=SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(1, 40) if chunked else rng.randint(longest, 64),
            max_model_len=longest,
            enable_chunked_prefill=chunked,
            delay_factor=rng.choice([0.0, 0.0, 0.5, 3.0]),
            preemption_mode=rng.choice(["recompute", "swap", "auto"]),
            preemption_victim=rng.choice(VICTIMS),
            thrash_guard=rng.random() < 0.9,
            fair_prefill=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "priority", "priority", "fair"]),
            priority_aging_s=rng.choice([0.0, 2.0, 60.0]),
            long_prefill_token_threshold=rng.choice([0, 0, 2, 7]),
            max_num_partial_prefills=rng.choice([None, 1, 2]),
            max_long_partial_prefills=rng.choice([None, 1]),
            target_itl_s=rng.choice([None, None, 0.2, 1.0]),
            step_order=rng.choice(["decode-first", "decode-first", "prefill-first"]),
            max_queue_time_s=rng.choice([None, None, None, rng.uniform(0, 30)]),
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=rng.randint(0, 2 * num_blocks),
        depth=rng.randint(1, 3),
        arrivals=arrivals,
        enable_prefix_caching=rng.random() < 0.7,
        controls=[
            (rng.randint(0, 40), random_control(rng, i, arrivals, max_num_seqs))
            for i in range(rng.choice([0, 0, 3, 8]))
        ],
    )


def random_control(
    rng: Random, number: int, arrivals: Sequence[Arrival], max_num_seqs: int
) -> Control:
    """A prefix of some prompt is pinned, or all that are cached are forgotten, or a setting
    changes; some of it is impossible, and refused."""
    kind = rng.choice(["pin", "pin", "reset_prefix_cache", "configure", "configure"])
    if kind == "pin":
        prompt = rng.choice(arrivals).message.prompt_token_ids
        args: dict[str, Any] = {
            "token_ids": prompt[: rng.randint(1, len(prompt))],
            "cache_salt": "",
            "ttl_s": rng.choice([None, rng.uniform(0, 10)]),
        }
    elif kind == "configure":
        args = dict([rng.choice(_knobs(rng, max_num_seqs))])
    else:
        args = {}
    return Control(number, kind, args)


def _knobs(rng: Random, max_num_seqs: int) -> list[tuple[str, Any]]:
    return [
        ("max_num_seqs", rng.randint(1, max_num_seqs)),
        ("max_num_batched_tokens", rng.randint(1, 40)),
        ("scheduling_policy", rng.choice(["fcfs", "priority", "fair"])),
        ("priority_aging_time", rng.choice([0.0, 1.0])),
        ("preemption_mode", rng.choice(["recompute", "swap", "auto"])),
        ("preemption_victim", rng.choice(VICTIMS)),
        ("step_order", rng.choice(["decode-first", "prefill-first"])),
        ("target_itl_ms", rng.choice([None, 500.0])),
        ("scheduler_delay_factor", rng.choice([0.0, 1.0])),
        ("long_prefill_token_threshold", rng.choice([0, 3])),
        ("max_num_partial_prefills", rng.choice([None, 1])),
        ("fair_prefill", rng.random() < 0.5),
    ]


def _random_arrival(rng: Random, request_id: str, longest: int) -> Arrival:
    """Mostly short prompts and long answers: those are what outgrows a pool."""
    num_prompt = rng.randint(1, min(longest, 6) if rng.random() < 0.6 else longest)
    room = longest - num_prompt
    max_tokens = room if rng.random() < 0.5 else rng.randint(0, room)
    # Few distinct tokens and a common start, so that prompts share prefixes.
    num_shared = rng.randint(0, num_prompt)
    prompt = [i % 5 for i in range(num_shared)]
    prompt += [rng.randint(0, 3) for _ in range(num_prompt - num_shared)]
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens)),
        temperature=0.0,
        stop_token_ids=rng.choice([(), (), (3,), (1, 11, 21)]),
        prompt_logprobs=rng.choice([None, None, 0]),
        logprobs=0,
    )
    turn = rng.randint(0, 3 if rng.random() < 0.6 else 30)
    abort_turn = turn + rng.randint(0, 40) if rng.random() < 0.25 else None
    message = AddRequest(
        request_id,
        prompt,
        sampling,
        100.0 + turn / 2,  # about when it arrives by the clock of `drive`
        priority=rng.choice([0, 0, 0, -1, 1]),
        client=rng.choice(["a", "a", "b"]),
        weight=rng.choice([1.0, 3.0]),
        timeout_s=rng.choice([None, None, None, rng.uniform(0, 20)]),
    )
    return Arrival(message, turn, abort_turn)


def workloads() -> st.SearchStrategy[Workload]:
    """random_workload, drawn by hypothesis, so that a failure is shrunk."""
    return st.randoms(use_true_random=False).map(random_workload)


@dataclass
class Run:
    """A finished run and the objects it left behind."""

    core: EngineCore
    scheduler: Scheduler
    kv: KVCacheManager
    executor: FakeExecutor
    outbox: FakeOutbox
    controls: list[tuple[int, Control]] = field(default_factory=list)
    num_turns: int = 0
    completions: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    prompt_positions: dict[str, list[int]] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)


def build(
    workload: Workload,
    *,
    kv_type: type[KVCacheManager] = KVCacheManager,
    scheduler_type: type[Scheduler] = Scheduler,
    executor_type: type[FakeExecutor] = FakeExecutor,
    core_type: type[EngineCore] = EngineCore,
    grammars: Grammars | None = None,
) -> Run:
    """The real core over the fake device."""
    kv = kv_type(
        workload.num_blocks,
        workload.block_size,
        workload.num_host_blocks,
        enable_prefix_caching=workload.enable_prefix_caching,
        max_pinned_blocks=workload.max_pinned_blocks,
    )
    scheduler = scheduler_type(kv, workload.limits, FakeClock())
    executor = executor_type(
        num_blocks=workload.num_blocks,
        block_size=workload.block_size,
        num_host_blocks=workload.num_host_blocks,
        max_num_seqs=workload.limits.max_num_seqs,
        max_num_batched_tokens=workload.limits.max_num_batched_tokens,
    )
    outbox = FakeOutbox()
    core = core_type(scheduler, executor, FakeInbox(), outbox, workload.depth, grammars=grammars)
    return Run(core, scheduler, kv, executor, outbox, workload.controls)


def drive(
    run: Run,
    arrivals: list[Arrival],
    *,
    max_turns: int = 20_000,
    after_turn: Callable[[Run], None] = lambda run: check_scheduler(run.scheduler),
) -> Run:
    """Deliver arrivals and aborts by turn, step until all is done, and collect what was said."""
    events = [*_events(arrivals), *run.controls]
    pending = deque(sorted(events, key=lambda event: event[0]))
    clock = run.scheduler.clock
    assert isinstance(clock, FakeClock)
    durations = Random(0)
    turn = 0
    while pending or run.core.has_work():
        assert turn < max_turns, "the engine does not come to an end"
        while pending and pending[0][0] <= turn:
            message = pending.popleft()[1]
            run.core.handle(message)
            if isinstance(message, AbortRequests):
                run.aborted.update(message.request_ids)
        _collect(run)
        if run.executor.violations:
            raise run.executor.violations[0]
        clock.advance(durations.random())  # so that costs are measured, and differ
        after_turn(run)
        turn += 1
    run.num_turns = turn
    return run


def _events(arrivals: list[Arrival]) -> list[tuple[int, ToEngine]]:
    events: list[tuple[int, ToEngine]] = []
    for arrival in arrivals:
        events.append((arrival.turn, arrival.message))
        if arrival.abort_turn is not None:
            events.append((arrival.abort_turn, AbortRequests([arrival.message.request_id])))
    return events


def _collect(run: Run) -> None:
    for delta in run.core.step():
        over = delta.request_id in run.reasons or delta.request_id in run.aborted
        assert not over, f"{delta.request_id} goes on after its end"
        run.completions.setdefault(delta.request_id, []).extend(delta.token_ids)
        for logprob in delta.prompt_logprobs or []:
            run.prompt_positions.setdefault(delta.request_id, []).append(-int(logprob.logprob))
        if delta.logprobs is not None:
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        if delta.finish_reason is not None:
            run.reasons[delta.request_id] = delta.finish_reason
            assert delta.times is not None
            run.preemptions[delta.request_id] = delta.times.num_preemptions


def check_answers(run: Run, workload: Workload) -> None:
    """Every request got exactly its sequential answer, or a beginning of it if it was aborted."""
    for arrival in workload.arrivals:
        message = arrival.message
        wanted = reference_completion(message.prompt_token_ids, message.sampling)
        got = run.completions.get(message.request_id, [])
        if run.reasons.get(message.request_id) is FinishReason.TIMEOUT:
            allowed = message.timeout_s, workload.limits.max_queue_time_s
            assert allowed != (None, None), message.request_id
            assert got == [], f"{message.request_id} had begun: {got}"
            continue
        if arrival.abort_turn is not None and message.request_id not in run.reasons:
            assert got == wanted[: len(got)], (message.request_id, got, wanted)
            continue
        assert got == wanted, (message.request_id, got, wanted)
        assert run.reasons[message.request_id] is _wanted_reason(message, wanted)
        scored = run.prompt_positions.get(message.request_id, [])
        positions = list(range(1, len(message.prompt_token_ids)))
        assert scored == (positions if message.sampling.prompt_logprobs is not None else [])


def _wanted_reason(message: AddRequest, completion: list[int]) -> FinishReason:
    sampling = message.sampling
    ends_on_stop = completion and completion[-1] in sampling.stop_token_ids
    if ends_on_stop and len(completion) > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH


def check_run(run: Run, workload: Workload) -> None:
    """All that must hold once a workload is done."""
    check_answers(run, workload)
    check_totals(run, workload)
    check_drained(run)
    for arrival in workload.arrivals if workload.limits.thrash_guard else ():
        times = run.preemptions.get(arrival.message.request_id, 0)
        assert times <= most_preemptions(arrival.message, workload), (arrival, times)


def most_preemptions(message: AddRequest, workload: Workload) -> int:
    """How often a request may be preempted: the headroom doubles until it fills the pool, and every
    more urgent request may push it out once more."""
    others = (arrival.message for arrival in workload.arrivals)
    num_more_urgent = sum(other.priority < message.priority for other in others)
    has_priority = workload.limits.policy == "priority" or workload.controls
    by_policy = num_more_urgent if has_priority else 0
    return workload.num_blocks.bit_length() + 2 + by_policy


def check_totals(run: Run, workload: Workload) -> None:
    """Every token is counted once, and no step is larger than its budget."""
    stats = run.scheduler.stats()
    assert stats.total_generation_tokens == sum(len(c) for c in run.completions.values())
    finished = sum(
        len(arrival.message.prompt_token_ids)
        for arrival in workload.arrivals
        if run.reasons.get(arrival.message.request_id, FinishReason.TIMEOUT)
        is not FinishReason.TIMEOUT
    )
    received = sum(len(arrival.message.prompt_token_ids) for arrival in workload.arrivals)
    assert finished <= stats.total_prompt_tokens <= received
    assert stats.step_tokens == run.executor.step_sizes


def check_drained(run: Run) -> None:
    """Nothing is left behind: no block, no row, no request."""
    stats = run.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
    assert not run.executor.rows, run.executor.rows.keys()
