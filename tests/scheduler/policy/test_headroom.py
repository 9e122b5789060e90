"""How much room a request asks for before it is let in; the watermark follows preemptions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.policy.headroom import CALM_STEPS, Headroom
from tests.scheduler.driver import make_scheduler, run_until_done
from tests.scheduler.test_preemption import victim
from tests.strategies import add_request, limits


def test_headroom_doubles_with_every_preemption() -> None:
    headroom = Headroom(100)
    rooms = [headroom.blocks(victim(num_preemptions=n), 3, limits()) for n in range(5)]
    assert rooms == [1, 4, 10, 22, 46]


def test_an_idle_engine_asks_for_no_headroom() -> None:
    assert Headroom(500).blocks(victim(num_preemptions=20), 0, limits()) == 0


def test_without_the_guard_there_is_none() -> None:
    assert Headroom(500).blocks(victim(num_preemptions=3), 3, limits(thrash_guard=False)) == 0


@given(st.integers(1, 5000), st.lists(st.booleans(), max_size=300))
def test_the_watermark_stays_within_its_bounds(num_blocks: int, steps: list[bool]) -> None:
    headroom = Headroom(num_blocks)
    for preempted in steps:
        before = headroom.watermark
        headroom.note_step(preempted=preempted)
        assert max(1, num_blocks // 100) <= headroom.watermark <= max(1, num_blocks // 4)
        assert headroom.watermark >= before if preempted else headroom.watermark <= before


def test_the_watermark_doubles_with_preemptions_and_calms_down() -> None:
    headroom = Headroom(1000)
    for _ in range(3):
        headroom.note_step(preempted=True)
    assert headroom.watermark == 80
    for _ in range(CALM_STEPS):
        headroom.note_step(preempted=False)
    assert headroom.watermark == 40
    for _ in range(10 * CALM_STEPS):
        headroom.note_step(preempted=False)
    assert headroom.watermark == 10


def test_preemptions_in_a_scheduler_raise_the_watermark_and_everything_still_finishes() -> None:
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=64)
    names = [f"r{number}" for number in range(30)]
    for name in names:
        scheduler.add(add_request(name, 6, 40))
    seen: set[int] = set()

    def watch(plan: object, deltas: object) -> None:
        seen.add(scheduler.headroom.watermark)

    assert set(run_until_done(scheduler, after=watch)) == set(names)
    assert 1 in seen
    assert max(seen) > 2
