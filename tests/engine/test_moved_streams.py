"""An engine dies under open streams, another one follows it, and no reader notices."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from random import Random

import pytest

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import core_over
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.inline import InlineClient
from serve.engine.succession import WINDOW_S, Succession
from serve.errors import ConfigError, EngineDead
from serve.messages import (
    AddRequest,
    Control,
    ControlResult,
    EngineDied,
    EngineLost,
    EngineReady,
    EngineStats,
    FinishReason,
    FromEngine,
    RequestTimes,
    TokenDelta,
    Told,
)
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import Notebook, ScriptedClient
from tests.engine.test_async_engine import FOUR, collect, ids, read, settle, text_of
from tests.fakes import FakeExecutor, reference_completion
from tests.text.tiny_tokenizers import served

SEEN = RequestTimes(5.0, 6.0, 7.0, 7.0, 2)


class Line:
    """Scripted engines, one after the other."""

    def __init__(self, most: int = 1) -> None:
        self.clients: list[ScriptedClient] = []
        self.notebook = Notebook()
        self.make: type[ScriptedClient] = ScriptedClient  # the next one
        succession = Succession(self._next, most)
        self.engine = AsyncEngine(succession, served(), self.notebook)

    def _next(self) -> ScriptedClient:
        self.clients.append(self.make())
        return self.clients[-1]

    async def kill(self) -> None:
        self.clients[-1].die("it was killed.")
        await settle()


async def line(most: int = 1) -> Line:
    made = Line(most)
    await made.engine.start()
    return made


async def test_an_open_stream_goes_on_in_the_next_engine_with_all_that_it_had() -> None:
    engines = await line()
    sampling = SamplingParams(max_tokens=4, temperature=0.7)  # its seed is drawn in front
    reader = read(engines.engine, sampling, prompt="abc")
    await settle()
    (first,) = engines.clients[0].added
    engines.clients[0].step(
        TokenDelta(first.request_id, ids("xy"), times=SEEN, num_cached_tokens=1)
    )
    await settle()
    await engines.kill()
    assert engines.clients[0].closed
    (moved,) = engines.clients[1].added
    assert moved.request_id == first.request_id
    assert moved.prompt_token_ids == first.prompt_token_ids
    assert moved.sampling == first.sampling
    assert moved.sampling.seed is not None
    assert moved.generated_token_ids == ids("xy")
    assert moved.told == Told(0, 1, SEEN.first_scheduled_time, SEEN.first_token_time, 2)
    last = TokenDelta(
        first.request_id, ids("zw"), finish_reason=FinishReason.LENGTH, num_cached_tokens=1
    )
    engines.clients[1].step(last)
    outputs = await reader
    assert text_of(outputs) == "xyzw"
    assert outputs[-1].num_generated_tokens == 4
    assert outputs[-1].num_cached_tokens == 1
    assert len(engines.notebook.first_tokens) == 1
    assert engines.notebook.restarts == 1
    await engines.engine.close()


async def test_what_comes_while_there_is_no_engine_waits_for_the_next_one() -> None:
    engines = await line()
    gate = asyncio.Event()

    class Slow(ScriptedClient):
        async def start(self) -> EngineReady:
            await gate.wait()
            return await super().start()

    engines.make = Slow
    await engines.kill()
    assert engines.engine.is_restarting
    assert engines.engine.dead_reason is None
    reader = read(engines.engine)
    prepared = engines.engine.prepare(ids("a"), FOUR)
    impatient = asyncio.create_task(collect(engines.engine.begin(prepared, timeout_s=0.01)))
    gone = read(engines.engine)
    asked = asyncio.create_task(engines.engine.control("state"))
    await settle()
    gone.cancel()
    assert (await impatient)[-1].finish_reason is FinishReason.TIMEOUT
    assert engines.clients[1].sent == []
    gate.set()
    await settle()
    assert not engines.engine.is_restarting
    (request,) = engines.clients[1].added
    (call,) = [message for message in engines.clients[1].sent if isinstance(message, Control)]
    engines.clients[1]._messages.put_nowait(ControlResult(call.call_id, "fine"))
    assert await asked == "fine"
    end = TokenDelta(request.request_id, ids("x"), finish_reason=FinishReason.STOP)
    engines.clients[1].step(end)
    await reader
    await engines.engine.close()


async def test_live_settings_and_pins_come_back_before_the_streams() -> None:
    engines = await line()
    answers = {"configure": {"scheduling_policy": "fcfs"}, "pin": {"id": "pin-1"}, "unpin": True}

    async def ask(name: str, **args: object) -> None:
        asked = asyncio.create_task(engines.engine.control(name, **args))
        await settle()
        call = engines.clients[-1].sent[-1]
        assert isinstance(call, Control)
        engines.clients[-1]._messages.put_nowait(ControlResult(call.call_id, answers[name]))
        await asked

    await ask("configure", max_num_seqs=3)
    await ask("configure", max_num_seqs=2, thrash_guard=False)
    await ask("pin", token_ids=[1, 2], cache_salt="", ttl_s=1000.0)
    reader = read(engines.engine)
    await settle()
    await engines.kill()
    configure, pin, stream = engines.clients[1].sent
    assert isinstance(configure, Control)
    assert (configure.name, configure.args) == (
        "configure",
        {"max_num_seqs": 2, "thrash_guard": False},
    )
    assert isinstance(pin, Control)
    assert pin.args["token_ids"] == [1, 2]
    assert 990 < pin.args["ttl_s"] <= 1000
    assert stream == engines.clients[1].added[0]
    engines.clients[1]._messages.put_nowait(ControlResult(configure.call_id, {}))
    engines.clients[1]._messages.put_nowait(ControlResult(pin.call_id, {"id": "pin-1"}))
    await settle()
    computed = engines.clients[1].added[1]  # the pinned prefix, computed once more
    assert (computed.prompt_token_ids, computed.sampling.max_tokens) == ([1, 2], 0)
    reader.cancel()
    await engines.engine.close()


async def test_totals_go_on_over_a_death_and_never_fall() -> None:
    engines = await line()

    def told(client: ScriptedClient, total: int) -> None:
        client.tell(EngineStats(num_running=1, total_generation_tokens=total))

    told(engines.clients[0], 5)
    told(engines.clients[0], 9)
    await settle()
    await engines.kill()
    told(engines.clients[1], 0)
    told(engines.clients[1], 4)
    await settle()
    totals = [stats.total_generation_tokens for stats in engines.notebook.stats]
    assert totals == [5, 9, 9, 13]
    await engines.engine.close()


async def test_a_second_death_within_a_minute_is_the_end() -> None:
    engines = await line()
    reader = read(engines.engine)
    await settle()
    await engines.kill()
    await engines.kill()
    with pytest.raises(EngineDead, match="it was killed"):
        await reader
    assert engines.engine.dead_reason == "it was killed."
    assert len(engines.clients) == 2
    await engines.engine.close()


async def test_an_engine_that_cannot_be_started_again_is_the_end_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = await line()

    class Broken(ScriptedClient):
        async def start(self) -> EngineReady:
            raise ConfigError("no memory is left.")

    engines.make = Broken
    reader = read(engines.engine)
    await settle()
    await engines.kill()
    with pytest.raises(EngineDead, match=r"killed.*could not be started again; the server's log"):
        await reader
    assert "could not be started again: no memory is left." in caplog.text
    await engines.engine.close()


@pytest.mark.parametrize("most", [0, 1, 2])
async def test_only_so_many_deaths_within_a_minute_are_forgiven(most: int) -> None:
    now, clients = 0.0, []

    def make() -> ScriptedClient:
        clients.append(ScriptedClient())
        return clients[-1]

    succession = Succession(make, most, clock=lambda: now)
    await succession.start()
    for _ in range(most):
        clients[-1].die("killed.")
        assert isinstance(await succession.receive(), EngineLost)
        assert isinstance(await succession.receive(), EngineReady)
    clients[-1].die("killed.")
    now = WINDOW_S - 1
    assert await succession.receive() == EngineDied("killed.")
    now = WINDOW_S
    clients[-1].die("killed.")
    assert isinstance(await succession.receive(), EngineLost if most else EngineDied)


class Mortal(InlineClient):
    """A real core that dies when it has said so many things, whatever was on its way."""

    def __init__(self, build: Callable[[Inbox, Outbox], object], life: int) -> None:
        super().__init__(build)  # type: ignore[arg-type]
        self._life = life

    async def receive(self) -> FromEngine:
        self._life -= 1
        return await super().receive() if self._life >= 0 else EngineDied("its time had come.")


@pytest.mark.parametrize("seed", range(6))
async def test_random_deaths_change_no_answer(seed: int) -> None:
    """Engines die again and again under requests that wait, prefill, decode and are preempted."""
    random, cores = Random(seed), []
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=8)
    )

    def build(inbox: Inbox, outbox: Outbox) -> tuple[EngineCore, EngineReady]:
        executor = FakeExecutor(12, 4, max_num_batched_tokens=16)
        core, ready = core_over(executor, config, inbox, outbox)
        cores.append(core)
        return core, ready

    def mortal() -> Mortal:
        return Mortal(build, random.randrange(1, 9) if len(cores) < 8 else 10**9)

    clock = itertools.count(step=WINDOW_S)
    succession = Succession(mortal, 1, clock=lambda: next(clock))
    engine = AsyncEngine(succession, served(), Notebook())
    await engine.start()
    prompts = [[1 + i % 7] * (1 + i % 9) for i in range(25)]
    asked = [SamplingParams(max_tokens=1 + i % 11, ignore_eos=True) for i in range(25)]
    wish = zip(prompts, asked, strict=True)
    answers = await asyncio.gather(*(collect(engine.generate(p, s)) for p, s in wish))
    got = [[token for output in answer for token in output.token_ids] for answer in answers]
    assert got == [reference_completion(p, s) for p, s in zip(prompts, asked, strict=True)]
    assert len(cores) > 3
    assert cores[-1].scheduler.kv.num_blocks_free == cores[-1].scheduler.kv.num_blocks
    await engine.close()


async def test_a_moved_stream_passes_a_full_queue_and_its_own_timeout() -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1),
    )

    def build(inbox: Inbox, outbox: Outbox) -> tuple[EngineCore, EngineReady]:
        return core_over(FakeExecutor(64, 4, max_num_batched_tokens=16), config, inbox, outbox)

    client = InlineClient(build)
    await client.start()
    core = client._core
    assert core is not None
    for number in range(5):
        sampling = SamplingParams(max_tokens=6, temperature=0.0)
        long_ago = time.monotonic() - 100
        told = Told(first_scheduled_time=long_ago, first_token_time=long_ago)
        core.handle(
            AddRequest(
                f"{number}",
                [3, 4],
                sampling,
                long_ago,
                timeout_s=1.0,
                generated_token_ids=reference_completion([3, 4], sampling)[:2],
                told=told,
            )
        )
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for delta in core.step():
            assert delta.finish_reason in (None, FinishReason.LENGTH), delta
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert tokens == {str(n): reference_completion([3, 4], sampling)[2:] for n in range(5)}
    await client.close()
