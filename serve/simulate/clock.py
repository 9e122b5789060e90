"""Time that passes only when a simulated step does."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation's start; call it as one calls `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, time: float) -> None:
        """Let time pass until `time`; an earlier one changes nothing."""
        self.now = max(self.now, time)
