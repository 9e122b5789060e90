"""Whether an engine that lives also does its work: health is more than a process that exists."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.errors import EngineSilent

HEARTBEAT_S = 1.0
"""How often an engine's process tells that it lives, whatever its step loop is at."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an engine may be silent."""

    process_s: float = 20.0  # without a sign of life from its process
    step_s: float = 600.0  # without a step's outputs, while it owes some


class Vigil:
    """Watches one engine; changed by AsyncEngine only.

    Two silences are told apart, because a step may take minutes on a CPU: a process that is frozen
    shows no life at all, one that is stuck lives and brings forth nothing.
    """

    def __init__(
        self,
        patience: Patience,
        seen_at: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = patience
        self._seen_at = seen_at
        self._clock = clock
        self._heard_at = clock()

    def begins_to_owe(self) -> None:
        """The engine, which owed nothing, has been asked for something."""
        self._heard_at = self._clock()

    def heard(self) -> None:
        """A step's outputs came."""
        self._heard_at = self._clock()

    def check(self, *, owes: bool) -> None:
        """Raises EngineSilent after too long a silence."""
        now = self._clock()
        silent_s = now - self._seen_at()
        if silent_s > self._patience.process_s:
            raise EngineSilent(
                f"The engine's process has shown no sign of life for {silent_s:.0f} s "
                "(--engine-timeout). Requests go on if it does."
            )
        stuck_s = now - self._heard_at
        if owes and stuck_s > self._patience.step_s:
            raise EngineSilent(
                f"The engine owes answers and has brought forth nothing for {stuck_s:.0f} s "
                "(--step-timeout). Requests go on if it does."
            )
