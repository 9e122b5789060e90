"""What the engine's front tells whoever keeps figures (the server's metrics, a test, nobody)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serve.engine.served_model import ServedModel
from serve.messages import EngineReady, EngineStats, FinishReason, RequestTimes
from serve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request's history, told once, however it ended.

    `times` are those of the steps' results, so that time to first token never exceeds the whole.
    A request that the front ended (abort, stop string) has no `first_scheduled_time`.
    """

    reason: FinishReason
    times: RequestTimes
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    sampling: SamplingParams
    engine: int = 0  # the one that worked on it last


class EngineObserver(Protocol):
    """Called on the event loop, between steps: every method must be quick and must not raise.

    `engine` is an engine's number, where several serve as one.
    """

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """The engines, `ready.num_engines` of them, can take requests."""

    def engine_restarted(self, engine: int) -> None:
        """This engine died and another one has taken its place; totals go on."""

    def stepped(self, stats: EngineStats) -> None:
        """A step's results arrived; `stats` is the state of its engine after it."""

    def first_token(self, latency_s: float, engine: int) -> None:
        """A request's first token, `latency_s` after its arrival. Once per request."""

    def inter_token(self, gap_s: float, engine: int) -> None:
        """A later token (or tokens of one step), `gap_s` after the one before."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """A request is over."""


class NoObserver:
    """For those who keep no figures."""

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """Ignored."""

    def engine_restarted(self, engine: int) -> None:
        """Ignored."""

    def stepped(self, stats: EngineStats) -> None:
        """Ignored."""

    def first_token(self, latency_s: float, engine: int) -> None:
        """Ignored."""

    def inter_token(self, gap_s: float, engine: int) -> None:
        """Ignored."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """Ignored."""


class Observers:
    """Several observers as one: each is told everything, in this order."""

    def __init__(self, *members: EngineObserver) -> None:
        self._members = members

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """Tell each."""
        for member in self._members:
            member.engine_ready(ready, model)

    def engine_restarted(self, engine: int) -> None:
        """Tell each."""
        for member in self._members:
            member.engine_restarted(engine)

    def stepped(self, stats: EngineStats) -> None:
        """Tell each."""
        for member in self._members:
            member.stepped(stats)

    def first_token(self, latency_s: float, engine: int) -> None:
        """Tell each."""
        for member in self._members:
            member.first_token(latency_s, engine)

    def inter_token(self, gap_s: float, engine: int) -> None:
        """Tell each."""
        for member in self._members:
            member.inter_token(gap_s, engine)

    def request_finished(self, finished: FinishedRequest) -> None:
        """Tell each."""
        for member in self._members:
            member.request_finished(finished)
