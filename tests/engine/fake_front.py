"""A scripted engine and an observer that remembers, for tests of the front."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import core_over
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.inline import InlineClient
from serve.engine.observer import FinishedRequest
from serve.engine.served_model import ServedModel
from serve.messages import (
    AbortRequests,
    AddRequest,
    EngineDied,
    EngineReady,
    EngineStats,
    FromEngine,
    StepOutputs,
    ToEngine,
    TokenDelta,
)
from serve.text.generation_config import GenerationConfig
from tests.fakes import FakeExecutor
from tests.text.tiny_tokenizers import served

READY = EngineReady(
    max_model_len=200,
    num_blocks=16,
    block_size=16,
    num_host_blocks=0,
    vocab_size=262,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    device="fake",
    dtype="float32",
    attention_backend="fake",
)


class ScriptedClient:
    """An EngineClient whose engine says what the test tells it to."""

    def __init__(self, ready: EngineReady = READY) -> None:
        self.ready = ready
        self.sent: list[ToEngine] = []
        self.closed = False
        self._messages: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._clock = 1000.0

    async def start(self) -> EngineReady:
        return self.ready

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        return await self._messages.get()

    def seen_at(self) -> float:
        return time.monotonic()

    async def close(self) -> None:
        self.closed = True

    def step(self, *deltas: TokenDelta, time: float = 0.0) -> None:
        """The engine's next step."""
        self._messages.put_nowait(StepOutputs(list(deltas), EngineStats(), time))

    def tell(self, stats: EngineStats) -> None:
        """A step that changed nothing but figures."""
        self._messages.put_nowait(StepOutputs([], stats, 0.0))

    def die(self, reason: str) -> None:
        self._messages.put_nowait(EngineDied(reason))

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    @property
    def aborted(self) -> list[str]:
        aborts = [message for message in self.sent if isinstance(message, AbortRequests)]
        return [request_id for message in aborts for request_id in message.request_ids]


@dataclass
class Notebook:
    """An EngineObserver that writes everything down."""

    models: list[ServedModel] = field(default_factory=list)
    restarts: int = 0
    stats: list[EngineStats] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        self.models.append(model)

    def engine_restarted(self, engine: int) -> None:
        self.restarts += 1

    def stepped(self, stats: EngineStats) -> None:
        self.stats.append(stats)

    def first_token(self, latency_s: float, engine: int) -> None:
        self.first_tokens.append(latency_s)

    def inter_token(self, gap_s: float, engine: int) -> None:
        self.gaps.append(gap_s)

    def request_finished(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)


async def scripted_engine(
    generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
) -> tuple[AsyncEngine, ScriptedClient, Notebook]:
    """A started front over a scripted engine; the tokenizer is the byte-level one."""
    client, notebook = ScriptedClient(), Notebook()
    engine = AsyncEngine(client, served(), notebook, names=("tiny",), generation=generation)
    await engine.start()
    return engine, client, notebook


@dataclass
class InlineEngine:
    """A front over the real core and scheduler, with the fake executor."""

    executor: FakeExecutor
    config: EngineConfig
    notebook: Notebook = field(default_factory=Notebook)

    async def start(self) -> AsyncEngine:
        client = InlineClient(self._build)
        self.engine = AsyncEngine(client, served(), self.notebook)
        await self.engine.start()
        return self.engine

    def _build(self, inbox: Inbox, outbox: Outbox) -> tuple[EngineCore, EngineReady]:
        self.core, ready = core_over(self.executor, self.config, inbox, outbox)
        return self.core, ready


def inline_engine(
    *, num_blocks: int = 64, block_size: int = 4, budget: int = 16, max_num_seqs: int = 8
) -> InlineEngine:
    executor = FakeExecutor(num_blocks, block_size, max_num_batched_tokens=budget)
    config = EngineConfig(
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )
    return InlineEngine(executor, config)
