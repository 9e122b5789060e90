"""Engine core and real runner over a device that runs behind: what is launched early never shows.

The model reads every token of a request back from the KV cache, so a wrong row, slot or order of
steps changes an answer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
import torch

from serve.engine.core import NO_MEMORY, EngineCore
from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.manager import KVCacheManager
from serve.messages import AddRequest, FinishReason, TokenDelta
from serve.sampling_params import SamplingParams
from serve.scheduler.invariants import check_scheduler
from serve.scheduler.output import SchedulerOutput
from serve.scheduler.scheduler import Scheduler
from serve.worker.executor import Launch, WorkerInfo
from tests.fakes import FakeInbox, FakeOutbox
from tests.strategies import limits
from tests.worker.async_device import AsyncDevice, GraphDevice
from tests.worker.harness import RunnerStand, next_token

VOCAB = 97
DEPTHS = [1, 2, 3]


class RunnerExecutor:
    """Executor over the runner; remembers what was launched and can break chosen steps."""

    def __init__(self, stand: RunnerStand) -> None:
        self.stand = stand
        self.plans: list[SchedulerOutput] = []
        self.bad_steps: set[int] = set()  # the model raises
        self.bad_copies: set[int] = set()  # raises before requests are admitted

    def start(self) -> WorkerInfo:
        raise AssertionError("the stand is ready as it is")

    def forward(self, plan: SchedulerOutput) -> Launch:
        number = len(self.plans)
        self.plans.append(plan)
        self.stand.model.fail_next = number in self.bad_steps
        copy = self.stand.storage.copy
        if number in self.bad_copies:
            self.stand.storage.copy = self._break  # type: ignore[method-assign]
            plan = replace(plan, copy=[*plan.copy, BlockCopy(0, 0)])  # so that there is one
        try:
            return self.stand.runner.forward(plan)
        finally:
            self.stand.storage.copy = copy  # type: ignore[method-assign]
            self.stand.model.fail_next = False

    def close(self) -> None:
        pass

    def _break(self, *arguments: object, **tiers: object) -> None:
        raise RuntimeError("no memory for the copy")


class Run:
    """A core at some depth, and what each request was told."""

    def __init__(
        self,
        depth: int,
        *,
        num_blocks: int = 60,
        host_blocks: int = 0,
        mode: str = "recompute",
        device: AsyncDevice | None = None,
    ) -> None:
        stand = RunnerStand(
            num_blocks=num_blocks,
            num_host_blocks=host_blocks,
            device=device or AsyncDevice(),
            graph_sizes=(2, 8),
        )
        self.executor = RunnerExecutor(stand)
        kv = KVCacheManager(num_blocks, 4, host_blocks)
        limited = limits(max_num_seqs=8, max_num_batched_tokens=16, preemption_mode=mode)
        scheduler = Scheduler(kv, limited)
        self.core = EngineCore(scheduler, self.executor, FakeInbox(), FakeOutbox(), depth)
        self.told: dict[str, list[TokenDelta]] = defaultdict(list)

    def serve(self, *messages: AddRequest, all_at_once: bool = True) -> None:
        waiting = list(messages)
        while waiting or self.core.has_work():
            for message in waiting[:]:
                self.core.handle(message)
                waiting.remove(message)
                if not all_at_once:
                    break
            for delta in self.core.step():
                self.told[delta.request_id].append(delta)
            check_scheduler(self.core.scheduler)

    def tokens(self, request_id: str) -> list[int]:
        return [t for delta in self.told[request_id] for t in delta.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        return self.told[request_id][-1].finish_reason

    def check_drained(self) -> None:
        kv = self.core.scheduler.kv
        assert kv.num_blocks_free == kv.num_blocks
        assert len(self.executor.stand.rows._free) == 8


def add(name: str, prompt: list[int], max_tokens: int, **sampling: object) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return AddRequest(name, prompt, params, arrival_time=0.0)


def answer(message: AddRequest) -> list[int]:
    """What one request alone, step by step, would be told."""
    tokens, stop = list(message.prompt_token_ids), message.sampling.stop_token_ids
    for _ in range(message.sampling.max_tokens or 0):
        tokens.append(next_token(tokens, VOCAB))
        if tokens[-1] in stop:
            break
    return tokens[len(message.prompt_token_ids) :]


def random_requests(seed: int, count: int) -> list[AddRequest]:
    random = Random(seed)
    requests = []
    for number in range(count):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 20))]
        free = answer(add("x", prompt, 12))
        stop = [random.choice(free)] if random.random() < 0.6 else []
        requests.append(add(f"r{number}", prompt, random.randint(1, 12), stop_token_ids=stop))
    return requests


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_found_late_never_tells_a_token_too_many(depth: int) -> None:
    run = Run(depth)
    prompt = [5, 6, 7]
    free = answer(add("x", prompt, 10))
    message = add("a", prompt, 10, stop_token_ids=[free[3]])
    run.serve(message, add("b", [9, 9], 10))

    assert run.tokens("a") == free[: free.index(free[3]) + 1]
    assert run.reason("a") is FinishReason.STOP
    assert run.told["a"][-1].token_ids, "the stop comes with its token, and nothing after it"
    num_computed = sum(
        entry.request_id == "a" for plan in run.executor.plans for entry in plan.scheduled
    )
    assert num_computed == len(run.tokens("a")) + depth - 1, "steps launched before it was known"
    run.check_drained()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("num_blocks", "host_blocks", "mode"),
    [(60, 0, "recompute"), (14, 0, "recompute"), (14, 30, "swap")],
)
def test_every_depth_gives_each_request_what_it_gets_alone(
    depth: int, num_blocks: int, host_blocks: int, mode: str
) -> None:
    num_swapped = 0
    for seed in range(6):
        run = Run(depth, num_blocks=num_blocks, host_blocks=host_blocks, mode=mode)
        requests = random_requests(seed, 12)
        run.serve(*requests, all_at_once=seed % 2 == 0)
        for message in requests:
            assert run.tokens(message.request_id) == answer(message)
        num_swapped += sum(len(p.swap_out) for p in run.executor.plans)
        run.check_drained()
    assert (num_swapped > 0) == (mode == "swap")


@pytest.mark.parametrize("depth", DEPTHS)
def test_replayed_steps_overlap_like_others(depth: int) -> None:
    device = GraphDevice()
    run = Run(depth, num_blocks=14, host_blocks=30, mode="swap", device=device)
    requests = random_requests(7, 12)
    run.serve(*requests)
    for message in requests:
        assert run.tokens(message.request_id) == answer(message)
    assert sum(graph.num_replays for graph in device.recorder.graphs) > 5
    run.check_drained()


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_reach_the_next_step_without_the_host(depth: int) -> None:
    run = Run(depth)
    run.serve(add("a", [5, 6, 7], 8))
    decodes = [p.scheduled[0] for p in run.executor.plans[1:] if p.scheduled]
    assert all(entry.num_tokens == 1 and not entry.token_ids for entry in decodes)
    assert run.tokens("a") == answer(add("a", [5, 6, 7], 8))


@pytest.mark.parametrize("depth", DEPTHS)
def test_steps_without_memory_end_their_requests_and_the_rest_go_on(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(depth)
    run.executor.stand.model.failure = torch.OutOfMemoryError("tried to allocate 2 GiB")
    run.executor.bad_steps = set(range(1, 7))  # more in a row than a broken device would get
    requests = random_requests(3, 30)
    run.serve(*requests)
    ended = [m for m in requests if run.reason(m.request_id) is FinishReason.ERROR]
    assert ended
    for message in requests:
        told = run.tokens(message.request_id)
        if message in ended:
            error = run.told[message.request_id][-1].error or ""
            assert error == f"request {message.request_id}: {NO_MEMORY}"
            assert told == answer(message)[: len(told)]
        else:
            assert told == answer(message)
    assert len(ended) < len(requests)
    assert "no memory for a step of" in caplog.text
    assert "--max-num-batched-tokens" in caplog.text
    run.check_drained()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("before_admission", [False, True])
def test_a_failed_step_ends_its_requests_while_later_steps_already_name_them(
    depth: int, before_admission: bool
) -> None:
    for bad_step in range(1, 9):
        run = Run(depth)
        where = run.executor.bad_copies if before_admission else run.executor.bad_steps
        where.add(bad_step)
        requests = random_requests(bad_step, 10)
        run.serve(*requests, all_at_once=False)
        named = {entry.request_id for entry in run.executor.plans[bad_step].scheduled}
        for message in requests:
            name = message.request_id
            told = run.tokens(name)
            if run.reason(name) is FinishReason.ERROR:
                assert name in named
                assert told == answer(message)[: len(told)]
            else:
                assert told == answer(message)
        assert any(run.reason(name) is FinishReason.ERROR for name in named)
        run.check_drained()
