"""What has happened since the engine's start, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.scheduler.preemption import PreemptionMode


@dataclass(slots=True)
class Totals:
    """Changed only by Scheduler. All but `step_tokens` only grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up, when a request first runs
    prefix_cache_hits: int = 0  # tokens found
    preemptions: dict[PreemptionMode, int] = field(
        default_factory=lambda: dict.fromkeys(PreemptionMode, 0)
    )
    step_tokens: list[int] = field(default_factory=list)  # of steps retired since last taken

    def take_step_tokens(self) -> list[int]:
        """Hand over the sizes of the steps retired since the last call."""
        taken, self.step_tokens = self.step_tokens, []
        return taken
