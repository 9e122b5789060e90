"""Random workloads for the engine, and the drive that runs them through the real core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from serve.engine.core import EngineCore
from serve.kv_cache.manager import KVCacheManager
from serve.messages import AbortRequests, AddRequest, FinishReason, ToEngine
from serve.sampling_params import SamplingParams
from serve.scheduler.limits import SchedulerLimits, kv_tokens_at_most
from serve.scheduler.scheduler import Scheduler
from tests.fakes import (
    VOCAB_SIZE,
    FakeClock,
    FakeExecutor,
    FakeInbox,
    FakeOutbox,
    reference_completion,
)


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


def add_request(
    request_id: str,
    prompt: list[int] | int,
    max_tokens: int,
    *,
    arrival_time: float = 0.0,
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


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small pools, small budgets, many requests: every kind of shortage, often."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    num_blocks = draw(st.integers(2, 24))
    pool_tokens = num_blocks * block_size
    max_model_len = draw(st.integers(2, min(48, pool_tokens + 8)))
    chunked = draw(st.booleans())
    budget = draw(st.integers(1, 40) if chunked else st.integers(max_model_len, 64))
    arrivals = [
        draw(_arrivals(f"r{i}", min(max_model_len, pool_tokens)))
        for i in range(draw(st.integers(1, 8)))
    ]
    return Workload(
        limits=SchedulerLimits(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            delay_factor=draw(st.sampled_from([0.0, 0.0, 0.5, 3.0])),
            preemption_mode=draw(st.sampled_from(["recompute", "swap", "auto"])),
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=draw(st.integers(0, 16)),
        depth=draw(st.integers(1, 3)),
        arrivals=arrivals,
    )


@st.composite
def _arrivals(draw: st.DrawFn, request_id: str, max_total: int) -> Arrival:
    num_prompt = draw(st.integers(1, max_total))
    max_tokens = draw(st.integers(0, max_total - num_prompt))
    # Few distinct tokens and a common start, so that prompts share prefixes.
    shared = draw(st.integers(0, num_prompt))
    prompt = [i % 5 for i in range(shared)]
    prompt += draw(st.lists(st.integers(0, 3), min_size=num_prompt - shared,
                            max_size=num_prompt - shared))  # fmt: skip
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens))),
        temperature=0.0,
        stop_token_ids=draw(st.sampled_from([(), (3,), tuple(range(0, VOCAB_SIZE, 4))])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        logprobs=0,
    )
    turn = draw(st.integers(0, 30))
    abort_turn = draw(st.one_of(st.none(), st.none(), st.integers(turn, turn + 40)))
    return Arrival(AddRequest(request_id, prompt, sampling, arrival_time=turn), turn, abort_turn)


@dataclass
class Run:
    """A finished run and the objects it left behind."""

    core: EngineCore
    scheduler: Scheduler
    kv: KVCacheManager
    executor: FakeExecutor
    outbox: FakeOutbox
    num_turns: int = 0
    completions: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    prompt_positions: dict[str, list[int]] = field(default_factory=dict)


def build(
    workload: Workload,
    *,
    kv_type: type[KVCacheManager] = KVCacheManager,
    scheduler_type: type[Scheduler] = Scheduler,
    executor_type: type[FakeExecutor] = FakeExecutor,
    core_type: type[EngineCore] = EngineCore,
) -> Run:
    """The real core over the fake device."""
    kv = kv_type(workload.num_blocks, workload.block_size, workload.num_host_blocks)
    scheduler = scheduler_type(kv, workload.limits, FakeClock())
    executor = executor_type(
        num_blocks=workload.num_blocks,
        block_size=workload.block_size,
        num_host_blocks=workload.num_host_blocks,
        max_num_seqs=workload.limits.max_num_seqs,
        max_num_batched_tokens=workload.limits.max_num_batched_tokens,
    )
    outbox = FakeOutbox()
    core = core_type(scheduler, executor, FakeInbox(), outbox, workload.depth)
    return Run(core, scheduler, kv, executor, outbox)


def drive(
    run: Run,
    arrivals: list[Arrival],
    *,
    max_turns: int = 20_000,
    after_turn: Callable[[Run], None] = lambda run: run.scheduler.check_invariants(),
) -> Run:
    """Deliver arrivals and aborts by turn, step until all is done, and collect what was said."""
    pending = deque(sorted(_events(arrivals), key=lambda event: event[0]))
    clock = run.scheduler.clock
    assert isinstance(clock, FakeClock)
    turn = 0
    while pending or run.core.has_work():
        assert turn < max_turns, "the engine does not come to an end"
        while pending and pending[0][0] <= turn:
            run.core.handle(pending.popleft()[1])
        _collect(run)
        clock.advance(1.0)
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
        assert delta.request_id not in run.reasons, f"{delta.request_id} goes on after its end"
        run.completions.setdefault(delta.request_id, []).extend(delta.token_ids)
        for logprob in delta.prompt_logprobs or []:
            run.prompt_positions.setdefault(delta.request_id, []).append(-int(logprob.logprob))
        if delta.logprobs is not None:
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        if delta.finish_reason is not None:
            run.reasons[delta.request_id] = delta.finish_reason


def check_answers(run: Run, workload: Workload) -> None:
    """Every request got exactly its sequential answer, or a beginning of it if it was aborted."""
    for arrival in workload.arrivals:
        message = arrival.message
        wanted = reference_completion(message.prompt_token_ids, message.sampling)
        got = run.completions.get(message.request_id, [])
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


def check_drained(run: Run) -> None:
    """Nothing is left behind: no block, no row, no request."""
    stats = run.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_blocks_used, stats.num_host_blocks_used) == (0, 0)
    assert not run.executor.rows, run.executor.rows.keys()


def fits(workload: Workload, message: AddRequest) -> bool:
    """Whether the workload's engine can ever run this request."""
    prompt, wanted = len(message.prompt_token_ids), message.sampling.max_tokens
    assert wanted is not None
    pool = workload.num_blocks * workload.block_size
    in_context = prompt + wanted <= workload.limits.max_model_len
    return in_context and kv_tokens_at_most(prompt, wanted) <= pool
