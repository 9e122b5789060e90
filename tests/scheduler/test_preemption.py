"""How a victim gives up its blocks, and how much room it asks for before it returns."""

from __future__ import annotations

import pytest

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.preemption import PreemptionMode, choose_mode, headroom
from serve.scheduler.request import Request, make_request
from tests.strategies import add_request


def victim(num_computed: int = 10, num_preemptions: int = 0) -> Request:
    made = make_request(add_request("a", 12, 5), (0, 0), 4)
    made.num_computed_tokens = num_computed
    made.num_preemptions = num_preemptions
    return made


@pytest.mark.parametrize(
    ("configured", "host_blocks", "wanted"),
    [
        ("recompute", 9, PreemptionMode.RECOMPUTE),
        ("swap", 9, PreemptionMode.SWAP),
        ("auto", 9, PreemptionMode.SWAP),
        ("swap", 2, PreemptionMode.RECOMPUTE),
        ("auto", 2, PreemptionMode.RECOMPUTE),
        ("swap", 3, PreemptionMode.SWAP),
    ],
)
def test_swap_needs_room_on_the_host(
    configured: str, host_blocks: int, wanted: PreemptionMode
) -> None:
    kv = KVCacheManager(9, 4, host_blocks)
    assert choose_mode(victim(), kv, configured) is wanted  # type: ignore[arg-type]


def test_headroom_doubles_with_every_preemption() -> None:
    rooms = [headroom(victim(num_preemptions=n), num_running=3, watermark=1) for n in range(5)]
    assert rooms == [1, 4, 10, 22, 46]


def test_an_idle_engine_asks_for_no_headroom() -> None:
    assert headroom(victim(num_preemptions=20), num_running=0, watermark=5) == 0
