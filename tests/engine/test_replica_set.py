"""Two engines behind one front."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from serve.api.figures.metrics import Metrics
from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import core_over
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.inspect.controls import Controls
from serve.engine.inspect.step_log import StepLog
from serve.engine.observer import Observers
from serve.engine.replica_set import IN_ONE, ReplicaSet
from serve.engine.succession import Succession
from serve.errors import EngineDead, InvalidRequest
from serve.messages import EngineReady
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import Notebook
from tests.engine.test_async_engine import collect, settle
from tests.engine.test_moved_streams import Mortal
from tests.fakes import FakeExecutor, reference_completion
from tests.text.tiny_tokenizers import served

CONFIG = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=4))
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Pair:
    """Two real cores over fake devices, and who looks on. `lives`: the messages after which the
    first engines die."""

    def __init__(self, most_deaths: int, lives: list[int]) -> None:
        self._lives = lives
        self.executors: list[FakeExecutor] = []
        self.cores: list[EngineCore] = []
        self.notebook, self.metrics = Notebook(), Metrics("vllm:")
        self.engine = AsyncEngine(
            Succession(lambda: ReplicaSet([self._client(), self._client()]), most_deaths),
            served(),
            Observers(self.notebook, self.metrics),
        )

    def _client(self) -> Mortal:
        executor = FakeExecutor(64, 4, max_num_batched_tokens=16, max_model_len=100)
        self.executors.append(executor)

        def build(inbox: Inbox, outbox: Outbox) -> tuple[EngineCore, EngineReady]:
            core, ready = core_over(executor, CONFIG, inbox, outbox)
            self.cores.append(core)
            return core, ready

        return Mortal(build, self._lives.pop(0) if self._lives else 10**9)

    def figure(self, name: str, engine: int) -> float:
        """A metric of one engine."""
        found = [
            line.rpartition(" ")[2]
            for line in self.metrics.render().decode().splitlines()
            if line.startswith(f"vllm:{name}{{") and f'engine="{engine}"' in line
        ]
        assert len(found) == 1, found
        return float(found[0])


async def pair(most_deaths: int = 0, lives: Sequence[int] = ()) -> Pair:
    made = Pair(most_deaths, list(lives))
    await made.engine.start()
    return made


async def assert_answered(two: Pair, prompts: list[list[int]], sampling: SamplingParams) -> None:
    readers = (collect(two.engine.generate(prompt, sampling)) for prompt in prompts)
    answers = await asyncio.gather(*readers)
    got = [[token for output in answer for token in output.token_ids] for answer in answers]
    assert got == [reference_completion(prompt, sampling) for prompt in prompts]


async def test_requests_go_to_the_engines_in_turn_and_figures_say_which_it_was() -> None:
    two = await pair()
    prompts = [[i, i + 1, i + 2] for i in range(1, 13)]
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    await assert_answered(two, prompts, sampling)
    served_by = [finished.engine for finished in two.notebook.finished]
    assert sorted(served_by) == [0] * 6 + [1] * 6
    assert {stats.engine for stats in two.notebook.stats} == {0, 1}
    for engine in (0, 1):
        assert two.figure("prompt_tokens_total", engine) == 18
        assert two.figure("time_to_first_token_seconds_count", engine) == 6
    text = two.metrics.render().decode()
    assert text.count("# TYPE vllm:prompt_tokens_total ") == 1  # one family, two samples
    await two.engine.close()
    assert all(executor.closed for executor in two.executors)


async def test_an_abort_reaches_the_engine_that_has_the_request() -> None:
    two = await pair()
    readers = [two.engine.generate([1, i], LONG, request_id=f"r{i}") for i in range(4)]
    for reader in readers:
        await anext(reader)
    await readers[1].aclose()
    await readers[3].aclose()
    for _ in range(5):
        await settle()
    running = [[r.label for r in core.scheduler.roster.running] for core in two.cores]
    assert running == [["r0", "r2"], []]
    await two.engine.close()


async def test_a_control_is_for_every_engine_and_has_one_answer() -> None:
    two = await pair()
    control = two.engine.control
    first, second = (two.engine.generate([1, i], LONG, request_id=f"r{i}") for i in range(2))
    await anext(first)
    await anext(second)
    state = await control("state")
    assert (state["num_running"], state["num_blocks"]) == (2, 2 * 64)
    assert sorted(each["id"] for each in state["running"]) == ["r0", "r1"]
    for name in ("r0", "r1"):
        (known,) = await control("requests", request_id=name)
        assert known["id"] == name
    assert (await two.engine.configure({"max_num_seqs": 3}))["max_num_seqs"] == 3
    assert [core.scheduler.limits.max_num_seqs for core in two.cores] == [3, 3]
    with pytest.raises(InvalidRequest, match="max_num_seqs"):
        await control("configure", max_num_seqs=0)
    claim = await control("pin", token_ids=[1] * 8, cache_salt="", ttl_s=None)
    assert (claim["num_blocks"], claim["num_cached_blocks"], claim["is_new"]) == (2, 0, True)
    assert [pin["id"] for pin in (await control("pins"))["pins"]] == [claim["id"]]
    assert await control("unpin", pin_id=claim["id"]) is True
    assert await control("unpin", pin_id=claim["id"]) is False
    await two.engine.close()


async def test_every_control_has_its_way_to_one_answer() -> None:
    two = await pair()
    scheduler: Any = two.cores[0].scheduler
    assert Controls(scheduler, StepLog(scheduler))._answers.keys() == IN_ONE.keys()
    await two.engine.close()


async def test_the_end_of_one_is_the_end_of_all() -> None:
    two = await pair(lives=[10**9, 3])
    readers = [collect(two.engine.generate([1, i], LONG)) for i in range(2)]
    ends = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDead, EngineDead]
    assert await two.engine.wait_dead() == "engine 1 of 2: its time had come."
    await two.engine.close()
    assert all(executor.closed for executor in two.executors)


async def test_all_are_started_again_and_every_stream_goes_on() -> None:
    two = await pair(most_deaths=1, lives=[10**9, 6])
    prompts = [[i, 7] for i in range(1, 5)]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    await assert_answered(two, prompts, sampling)
    assert two.notebook.restarts == 2  # one for each engine
    assert len(two.executors) == 4
    for engine in (0, 1):
        totals = [s.total_generation_tokens for s in two.notebook.stats if s.engine == engine]
        assert totals == sorted(totals)
        assert two.figure("engine_restarts_total", engine) == 1
    await two.engine.close()
