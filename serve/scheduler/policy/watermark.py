"""Blocks kept free at every admission: more after preemptions, fewer again when all is calm."""

from __future__ import annotations

CALM_STEPS = 64
"""Steps without preemption after which the watermark is halved."""


class Watermark:
    """Between 1 % and a quarter of the pool (at least one block each); doubles with every step that
    preempts. It holds back only admissions beside running requests, so nothing waits for ever."""

    def __init__(self, num_blocks: int) -> None:
        self._least = max(1, num_blocks // 100)
        self._most = max(self._least, num_blocks // 4)
        self._num_calm = 0
        self.blocks = self._least

    def note_step(self, *, preempted: bool) -> None:
        """A step has been planned."""
        if preempted:
            self._num_calm = 0
            self.blocks = min(self._most, 2 * self.blocks)
            return
        self._num_calm += 1
        if self._num_calm >= CALM_STEPS:
            self._num_calm = 0
            self.blocks = max(self._least, self.blocks // 2)
