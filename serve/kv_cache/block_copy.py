"""The order to copy one block, as the cache manager plans it and the worker carries it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's contents. Which tiers `src` and `dst` index depends on the list it is in."""

    src: int
    dst: int
