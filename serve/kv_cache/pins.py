"""Prefixes that are to stay in the cache: which blocks' contents are claimed, and until when.

A pin claims contents, by their hashes, not blocks: it may come before they are computed, and holds
for whichever block comes to hold them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Pin:
    """One claim. `expires_at` is the scheduler's clock; infinity: until it is taken back."""

    pin_id: str
    hashes: tuple[bytes, ...]  # of the prefix's full blocks
    expires_at: float = math.inf
    num_regimes: int = 1  # the prefix's blocks are in `hashes` once for each (prompt_regimes.py)

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prefix."""
        return len(self.hashes) // self.num_regimes


class PrefixPins:
    """Changed only by KVCacheManager. Contents that several pins claim count once."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.by_id: dict[str, Pin] = {}
        self._claims: Counter[bytes] = Counter()
        self._next_expiry = math.inf

    @property
    def num_blocks(self) -> int:
        """Blocks' contents that are claimed."""
        return len(self._claims)

    def __contains__(self, value: bytes) -> bool:
        return value in self._claims

    def num_new(self, hashes: Sequence[bytes]) -> int:
        """How many of these nobody claims yet."""
        return sum(value not in self._claims for value in hashes)

    def put(self, pin: Pin) -> None:
        """Enter a claim; one that is there already lasts as long as the longer of both."""
        known = self.by_id.get(pin.pin_id)
        if known is None:
            self._claims.update(pin.hashes)
        else:
            pin = replace(pin, expires_at=max(pin.expires_at, known.expires_at))
        self.by_id[pin.pin_id] = pin
        self._next_expiry = min(pin.expires_at for pin in self.by_id.values())

    def remove(self, pin_id: str) -> list[bytes] | None:
        """Take a claim back; the contents that nobody claims any more. None if it is unknown."""
        pin = self.by_id.pop(pin_id, None)
        if pin is None:
            return None
        self._next_expiry = min((p.expires_at for p in self.by_id.values()), default=math.inf)
        self._claims.subtract(pin.hashes)
        free = [value for value in pin.hashes if not self._claims[value]]
        for value in free:
            del self._claims[value]
        return free

    def expired(self, now: float) -> list[str]:
        """The ids of those whose time is up."""
        if now <= self._next_expiry:
            return []
        return [pin_id for pin_id, pin in self.by_id.items() if pin.expires_at < now]

    def check_invariants(self) -> None:
        """Every claim is some pin's, and they keep to the cap."""
        claims = Counter(value for pin in self.by_id.values() for value in pin.hashes)
        assert claims == self._claims
        assert len(claims) <= self.max_blocks, (len(claims), self.max_blocks)
