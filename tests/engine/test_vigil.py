"""Two silences of an engine, and which of them counts when."""

from __future__ import annotations

import pytest

from serve.engine.vigil import Patience, Vigil
from serve.errors import EngineSilent
from tests.fakes import FakeClock


def test_sec_48_a_frozen_process_is_silent_and_a_slow_step_is_not() -> None:
    clock, seen_at = FakeClock(), [100.0]
    vigil = Vigil(Patience(process_s=20, step_s=600), lambda: seen_at[0], clock)
    clock.advance(20)
    vigil.check(owes=True)
    clock.advance(1)
    for owes in (True, False):
        with pytest.raises(EngineSilent, match=r"no sign of life for 21 s \(--engine-timeout\)"):
            vigil.check(owes=owes)
    for _ in range(50):  # a step of ten minutes, whose process lives
        clock.advance(11)
        seen_at[0] = clock.now
        vigil.check(owes=True)


def test_sec_48_a_step_without_end_counts_while_something_is_owed() -> None:
    clock = FakeClock()
    vigil = Vigil(Patience(process_s=20, step_s=600), clock, clock)
    clock.advance(601)
    vigil.check(owes=False)
    vigil.begins_to_owe()
    clock.advance(600)
    vigil.check(owes=True)
    clock.advance(1)
    with pytest.raises(EngineSilent, match=r"brought forth nothing for 601 s \(--step-timeout\)"):
        vigil.check(owes=True)
    vigil.heard()
    vigil.check(owes=True)
