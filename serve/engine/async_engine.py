"""The front half of the engine: requests in, streams of text out.

One task, the pump, receives the engine's step outputs and feeds every stream; each stream has one
reader. When the engine dies and another one may follow it, every open stream moves there and goes
on with the token that it would have had.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace
from random import Random
from typing import Any

from serve.engine.client import EngineClient
from serve.engine.control_calls import Answer, ControlCalls, value_of
from serve.engine.observer import EngineObserver
from serve.engine.open_streams import OpenStreams
from serve.engine.outputs import RequestOutput
from serve.engine.request_limits import Prepared, check_priority, resolve_sampling, with_seed
from serve.engine.request_stream import RequestStream
from serve.engine.served_model import ServedModel, served_model
from serve.engine.vigil import Patience, Vigil
from serve.errors import EngineDead, ServeError, ShuttingDown
from serve.messages import (
    AddRequest,
    ControlResult,
    EngineDied,
    EngineLost,
    EngineReady,
    StepOutputs,
)
from serve.sampling_params import SamplingParams
from serve.text.detokenizer import Detokenizer, text_plan
from serve.text.generation_config import GenerationConfig
from serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Everything the API needs of an engine. Lives on one event loop; `start` first, `close` last.

    `ready` and `model` exist from `start` on. `dead_reason` says why nothing can be generated any
    more, or is None. `is_restarting`: the engine died, and its successor is not ready yet.
    `is_leaving`: it will not be here for long, so that new requests had better go elsewhere.
    `seed` is where the seeds of requests without one come from.
    """

    ready: EngineReady
    model: ServedModel

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        observer: EngineObserver,
        *,
        names: tuple[str, ...] = ("default",),
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        seed: int = 0,
        patience: Patience = Patience(),  # noqa: B008 (frozen)
    ) -> None:
        self.tokenizer = tokenizer
        self.dead_reason: str | None = None
        self.is_restarting = self.is_leaving = self._draining = False
        self._client = client
        self._seeds = Random(seed)
        self._observer = observer
        self._names = names
        self._generation = generation
        self._ids = itertools.count()
        self._streams = OpenStreams(client, observer, self._before_asking)
        self._calls = ControlCalls(client)
        self._vigil = Vigil(patience, client.seen_at)
        self._dead = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._restoring: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the engine. Raises ConfigError or EngineDead."""
        self.ready = await self._client.start()
        self.tokenizer.max_model_len = self.ready.max_model_len
        end_id = self.tokenizer.eos_token_id
        self.model = served_model(self._names, self.ready, self._generation, end_id)
        self._observer.engine_ready(self.ready, self.model)
        self._pump_task = asyncio.create_task(self._pump(), name="engine-pump")

    def prepare(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        continues_prompt: bool = True,
    ) -> Prepared:
        """Check a request and work out what all choices of its prompt share. What can never be
        answered is refused here (PromptTooLong, InvalidRequest, EngineDead, EngineSilent).

        `continues_prompt`: the text goes on from the prompt's (a completion); otherwise it stands
        alone (a chat answer).
        """
        self._check_open()
        resolved = resolve_sampling(prompt_token_ids, sampling, self.model, self.ready)
        end_ids = frozenset() if sampling.ignore_eos else self.model.eos_token_ids
        context = prompt_token_ids if continues_prompt else []
        plan = text_plan(self.tokenizer.tokens, resolved, context)
        return Prepared(prompt_token_ids, resolved, end_ids, plan)

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the one choice of a request by itself: `begin` of what `prepare` makes."""
        return self.begin(self.prepare(prompt_token_ids, sampling), request_id=request_id)

    def begin(
        self,
        prepared: Prepared,
        *,
        seed: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        client: str = "",
        weight: float = 1.0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream one choice's output; `seed` stands in for that of its sampling. The engine hears
        of it with the first step of the iteration.

        Closing or cancelling the iteration aborts the request. `request_id` is the client's label,
        which need not be unique. Raises InvalidRequest at once for a priority without effect, and
        EngineDead, here and from the iteration, as soon as the engine dies.
        """
        self._check_open()
        check_priority(priority, self.ready)
        request = AddRequest(
            f"{next(self._ids)}",
            prepared.prompt_token_ids,
            with_seed(prepared.for_engine(seed), self._seeds),
            time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            client=client,
            weight=weight,
            label=request_id,
        )
        stream = RequestStream(request, Detokenizer(prepared.text), prepared.end_of_text_ids)
        return self._streams.read(request, stream)

    def abort(self, labels: Collection[str]) -> None:
        """End requests by their labels; their readers get RequestAborted."""
        self._streams.abort(labels)

    async def control(self, name: str, /, **args: Any) -> Any:
        """Ask the engine to show or change something (see `controls`); its answer.

        Raises InvalidRequest for what it refuses, QueueFull when too much is asked at once,
        EngineDead when it is dead or dies meanwhile.
        """
        self._check_alive()
        return await self._calls.ask(name, args)

    async def configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change scheduler settings while it runs; all that may change, as they are then.

        Raises as `control` does.
        """
        settings: dict[str, Any] = await self.control("configure", **changes)
        policy = settings["scheduling_policy"]
        self.ready = replace(self.ready, scheduling_policy=policy)
        return settings

    def check_health(self) -> None:
        """Raises EngineDead or EngineSilent unless the engine lives and does its work."""
        self._check_alive()
        self._check_vigil()

    async def wait_dead(self) -> str:
        """Wait until the engine is dead; the reason."""
        await self._dead.wait()
        assert self.dead_reason is not None
        return self.dead_reason

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, and wait until all running ones have been read to their end, or
        for `timeout_s`."""
        self._draining = self.is_leaving = True
        try:
            await asyncio.wait_for(self._streams.until_all_read(), timeout_s)
        except TimeoutError:
            num_left = self._streams.num_readers
            logger.warning("%d requests did not finish within %g s", num_left, timeout_s)

    async def close(self) -> None:
        """Stop the engine. Requests that still run get ShuttingDown."""
        tasks = self._restoring if self._pump_task is None else [*self._restoring, self._pump_task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.dead_reason is None:
            self._draining = self.is_leaving = True
            self._die("the server is shutting down.")
        await self._client.close()
        self.tokenizer.close()

    def _before_asking(self) -> None:
        self._check_alive()
        if not self._streams:
            self._vigil.begins_to_owe()

    def _check_open(self) -> None:
        self._check_alive()
        if self._draining:
            raise ShuttingDown("The server is shutting down and takes no new requests.")
        self._check_vigil()

    def _check_vigil(self) -> None:
        if not self.is_restarting:  # then nothing can be heard
            self._vigil.check(owes=bool(self._streams))

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise self._death(self.dead_reason)

    def _death(self, reason: str) -> EngineDead:
        return ShuttingDown(reason) if self._draining else EngineDead(reason)

    async def _pump(self) -> None:
        """Feed the streams until the engine dies."""
        try:
            while True:
                match await self._client.receive():
                    case StepOutputs() as outputs:
                        self._vigil.heard()
                        self._observer.stepped(outputs.stats)
                        self._streams.distribute(outputs)
                    case ControlResult() as result:
                        self._calls.answered(result)
                    case EngineLost(reason):
                        self._hold(reason)
                    case EngineReady() as ready:
                        self._resume(ready)
                    case EngineDied(reason):
                        self._die(reason)
                        return
        except Exception:
            logger.exception("the engine's front failed")
            self._die("the engine's front failed; the server's log says why.")

    def _hold(self, reason: str) -> None:
        """The engine is lost; another one is on its way, to which all that is open will move."""
        logger.error("the engine died: %s", reason)
        logger.warning("starting it again; %d open streams will go on", len(self._streams))
        self.is_restarting = True
        expiring = self._streams.expire_while(lambda: self.is_restarting)
        self._restoring.append(asyncio.create_task(expiring, name="engine-away"))

    def _resume(self, ready: EngineReady) -> None:
        """Set a new engine up as the last one was, and move every open stream to it."""
        self.ready = replace(ready, scheduling_policy=self.ready.scheduling_policy)
        self.is_restarting = False
        self._vigil.heard()
        for engine in range(ready.num_engines):
            self._observer.engine_restarted(engine)
        repeated = self._calls.repeat()
        self._streams.move()
        self._restoring = [asyncio.create_task(self._restore(repeated), name="engine-restore")]
        logger.info("the engine is back, and %d streams go on", len(self._streams))

    async def _restore(self, repeated: list[tuple[str, dict[str, Any], Answer]]) -> None:
        """Hear what a new engine says to its setup; compute the pinned prefixes once more."""
        for name, args, answer in repeated:
            try:
                value_of(await answer)
                if name == "pin":
                    salt = args["cache_salt"] or None
                    only_prompt = SamplingParams(max_tokens=0)
                    prepared = self.prepare(args["token_ids"], only_prompt)
                    async for _ in self.begin(prepared, cache_salt=salt):
                        pass
            except ServeError as error:
                logger.warning("%s could not be repeated after the restart: %s", name, error)

    def _die(self, reason: str) -> None:
        """End every open stream with EngineDead, now and for good."""
        self.dead_reason = reason
        self.is_restarting = False
        self._dead.set()
        self._calls.fail(self._death(reason))
        self._streams.fail(self._death(reason))
