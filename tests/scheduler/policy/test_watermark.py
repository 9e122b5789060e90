"""The admission watermark adapts to recent preemptions, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.policy.watermark import CALM_STEPS, Watermark
from tests.scheduler.driver import make_scheduler, run_until_done
from tests.strategies import add_request


@given(st.integers(1, 5000), st.lists(st.booleans(), max_size=300))
def test_it_stays_within_its_bounds(num_blocks: int, steps: list[bool]) -> None:
    watermark = Watermark(num_blocks)
    for preempted in steps:
        before = watermark.blocks
        watermark.note_step(preempted=preempted)
        assert max(1, num_blocks // 100) <= watermark.blocks <= max(1, num_blocks // 4)
        assert watermark.blocks >= before if preempted else watermark.blocks <= before


def test_it_doubles_with_preemptions_and_calms_down() -> None:
    watermark = Watermark(1000)
    for _ in range(3):
        watermark.note_step(preempted=True)
    assert watermark.blocks == 80
    for _ in range(CALM_STEPS):
        watermark.note_step(preempted=False)
    assert watermark.blocks == 40
    for _ in range(10 * CALM_STEPS):
        watermark.note_step(preempted=False)
    assert watermark.blocks == 10


def test_preemptions_in_a_scheduler_raise_it_and_everything_still_finishes() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=64)
    names = [f"r{number}" for number in range(30)]
    for name in names:
        scheduler.add(add_request(name, 6, 40))
    seen: set[int] = set()

    def watch(plan: object, deltas: object) -> None:
        seen.add(scheduler.headroom.watermark_blocks)

    assert set(run_until_done(scheduler, after=watch)) == set(names)
    assert 1 in seen
    assert max(seen) > 2
