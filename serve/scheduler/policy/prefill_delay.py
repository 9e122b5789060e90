"""`--scheduler-delay-factor`: new prompts are held back for a while, to be prefilled together."""

from __future__ import annotations


class PrefillDelay:
    """Measures the last step that prefilled; holds waiting requests back for a multiple of it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_time = 0.0
        self._last_had_prompt = False
        self._last_prompt_latency = 0.0

    def begin_step(self, now: float) -> None:
        """A step is being planned: if the last one prefilled, now is when it was over."""
        if self._last_had_prompt:
            self._last_prompt_latency = now - self._last_time
        self._last_time = now

    def end_step(self, has_prompt: bool) -> None:
        """The step is planned; `has_prompt`: it has more than single-token decodes."""
        self._last_had_prompt = has_prompt

    def allows(self, now: float, earliest_arrival: float | None, num_running: int) -> bool:
        """Whether waiting requests may start. Nobody waits for an idle engine."""
        if self._factor <= 0 or num_running == 0 or earliest_arrival is None:
            return True
        return now - earliest_arrival > self._factor * self._last_prompt_latency
