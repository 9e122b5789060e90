"""What `serve-llm plan` asks beside serve's own flags."""

from __future__ import annotations

from dataclasses import dataclass

from serve.config import Count
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The machine to plan for, and the lengths of interest."""

    memory: Count | None = None
    """Memory of the device (80GiB); default: what this machine has left."""
    lengths: tuple[Count, ...] = ()
    """Prompt plus answer, in tokens, for which to tell how many requests fit; default: a few."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"--memory {self.memory} is not possible: it must be above 0.")
        if any(length < 1 for length in self.lengths):
            raise ConfigError("--lengths must be at least 1 token each.")
