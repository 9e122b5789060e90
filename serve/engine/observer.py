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


class EngineObserver(Protocol):
    """Called on the event loop, between steps: every method must be quick and must not raise."""

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """The engine can take requests."""

    def engine_restarted(self) -> None:
        """The engine died and another one has taken its place; totals go on."""

    def stepped(self, stats: EngineStats) -> None:
        """A step's results arrived; `stats` is the engine's state after it."""

    def first_token(self, latency_s: float) -> None:
        """A request's first token, `latency_s` after its arrival. Once per request."""

    def inter_token(self, gap_s: float) -> None:
        """A later token (or tokens of one step), `gap_s` after the one before."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """A request is over."""


class NoObserver:
    """For those who keep no figures."""

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """Ignored."""

    def engine_restarted(self) -> None:
        """Ignored."""

    def stepped(self, stats: EngineStats) -> None:
        """Ignored."""

    def first_token(self, latency_s: float) -> None:
        """Ignored."""

    def inter_token(self, gap_s: float) -> None:
        """Ignored."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """Ignored."""
