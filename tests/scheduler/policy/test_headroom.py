"""How much room a request asks for before it is let in."""

from __future__ import annotations

from serve.scheduler.policy.headroom import Headroom
from tests.scheduler.test_preemption import victim
from tests.strategies import limits


def test_headroom_doubles_with_every_preemption() -> None:
    headroom = Headroom(100)
    rooms = [headroom.blocks(victim(num_preemptions=n), 3, limits()) for n in range(5)]
    assert rooms == [1, 4, 10, 22, 46]


def test_an_idle_engine_asks_for_no_headroom() -> None:
    assert Headroom(500).blocks(victim(num_preemptions=20), 0, limits()) == 0


def test_without_the_guard_there_is_none() -> None:
    assert Headroom(500).blocks(victim(num_preemptions=3), 3, limits(thrash_guard=False)) == 0
