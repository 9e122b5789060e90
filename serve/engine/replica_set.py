"""Several engines that serve the same model, seen as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from serve.engine.client import EngineClient
from serve.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlResult,
    EngineDied,
    EngineReady,
    FromEngine,
    StepOutputs,
    ToEngine,
)

logger = logging.getLogger(__name__)


class ReplicaSet:
    """An EngineClient over several, which take requests in turn. They die together: the end of one
    is the end of all, and a Succession around them starts them all again.

    Figures keep the number of the engine whose they are. A control is for every engine, and their
    answers are one.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = list(clients)
        self._inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._answers: dict[int, _Answers] = {}
        self._death: EngineDied | None = None
        self._readers: list[asyncio.Task[None]] = []

    async def start(self) -> EngineReady:
        """Start all. What is told of them is what holds for each."""
        starts = (client.start() for client in self._clients)
        started = await asyncio.gather(*starts, return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        readies = [ready for ready in started if isinstance(ready, EngineReady)]
        self._readers = [
            asyncio.create_task(self._read(number), name=f"engine-{number}")
            for number in range(len(self._clients))
        ]
        return replace(
            readies[0],
            max_model_len=min(ready.max_model_len for ready in readies),
            num_blocks=min(ready.num_blocks for ready in readies),
            num_host_blocks=min(ready.num_host_blocks for ready in readies),
            identity="\n".join(dict.fromkeys(ready.identity for ready in readies)),
            num_engines=len(readies),
        )

    def send(self, message: ToEngine) -> None:
        """A request, and its end, to the engine whose turn it is; anything else to all."""
        match message:
            case AddRequest():
                self._of(message.request_id).send(message)
            case AbortRequests(request_ids):
                for request_id in request_ids:
                    self._of(request_id).send(replace(message, request_ids=[request_id]))
            case _:
                if isinstance(message, Control):
                    self._answers[message.call_id] = _Answers(message.name, len(self._clients))
                for client in self._clients:
                    client.send(message)

    async def receive(self) -> FromEngine:
        """The next message of any of them; EngineDied, at once and every time, after the last."""
        if self._death is None:
            message = await self._inbox.get()
            if not isinstance(message, EngineDied):
                return message
            self._death = message
        return self._death

    def seen_at(self) -> float:
        """When the one that has been silent longest showed life."""
        return min(client.seen_at() for client in self._clients)

    async def close(self) -> None:
        """End all."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
        self._death = self._death or EngineDied("the engines were closed.")
        self._inbox.put_nowait(self._death)

    def _of(self, request_id: str) -> EngineClient:
        """In turn, since ids are the numbers of requests."""
        return self._clients[int(request_id) % len(self._clients)]

    async def _read(self, number: int) -> None:
        """Hand on what one engine says, to its end."""
        try:
            await self._hand_on(number)
        except Exception as error:
            logger.exception("what engine %d says cannot be handed on", number)
            self._inbox.put_nowait(EngineDied(f"engine {number} cannot be heard: {error}"))

    async def _hand_on(self, number: int) -> None:
        while True:
            match await self._clients[number].receive():
                case StepOutputs() as outputs:
                    stats = replace(outputs.stats, engine=number)
                    self._inbox.put_nowait(replace(outputs, stats=stats))
                case ControlResult() as result:
                    self._answered(number, result)
                case EngineDied(reason) as died:
                    told = f"engine {number} of {len(self._clients)}: {reason}"
                    self._inbox.put_nowait(replace(died, reason=told))
                    return
                case message:
                    self._inbox.put_nowait(message)

    def _answered(self, number: int, result: ControlResult) -> None:
        answers = self._answers[result.call_id]
        if (whole := answers.take(number, result)) is not None:
            del self._answers[result.call_id]
            self._inbox.put_nowait(whole)


class _Answers:
    """What the engines answer to one control, in their order."""

    def __init__(self, name: str, num_engines: int) -> None:
        self._name = name
        self._results: list[ControlResult | None] = [None] * num_engines

    def take(self, number: int, result: ControlResult) -> ControlResult | None:
        """Note an answer; once it was the last, all in one. A refusal is everyone's."""
        self._results[number] = result
        results = [each for each in self._results if each is not None]
        if len(results) < len(self._results):
            return None
        refusal = next((each for each in results if each.error is not None), None)
        if refusal is not None:
            return refusal
        return replace(result, value=IN_ONE[self._name]([each.value for each in results]))


Values = dict[str, Any]


def _first(values: Sequence[Any]) -> Any:
    """All are set up alike."""
    return values[0]


def _listed(values: Sequence[list[Any]]) -> list[Any]:
    return [item for value in values for item in value]


def _state(states: Sequence[Values]) -> Values:
    """Queues and pools together; what is no number of something and no list is the first's."""
    together = dict(states[0])
    for name, value in states[0].items():
        if name.startswith("num_"):
            together[name] = sum(state[name] for state in states)
        elif isinstance(value, list):
            together[name] = _listed([state[name] for state in states])
    return together


def _pin(pins: Sequence[Values]) -> Values:
    """A prefix is pinned everywhere, and cached as far as it is everywhere."""
    num_cached = min(pin["num_cached_blocks"] for pin in pins)
    is_new = any(pin["is_new"] for pin in pins)
    return {**pins[0], "num_cached_blocks": num_cached, "is_new": is_new}


def _reset(answers: Sequence[Values]) -> Values:
    forgotten = sum(answer["num_blocks_forgotten"] for answer in answers)
    return {**answers[0], "num_blocks_forgotten": forgotten}


IN_ONE: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {
        "state": _state,
        "requests": _listed,
        "trace": _listed,
        "settings": _first,
        "configure": _first,
        "pin": _pin,
        "unpin": any,
        "pins": _first,
        "reset_prefix_cache": _reset,
    }
)
"""How the engines' answers to each control become one."""
