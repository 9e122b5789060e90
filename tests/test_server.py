"""What the server process does besides serving."""

from __future__ import annotations

import gc
import weakref

from serve.serving import spare_the_collector


def test_what_comes_after_the_start_is_still_collected() -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    try:
        spare_the_collector()
        assert gc.get_freeze_count() > 0
        knot = weakref.ref(Knot())
        gc.collect()
        assert knot() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
