"""Anthropic's `cache_control`: what a request marks as cacheable is pinned for a while.

A mark covers everything before it, so the last one decides. The blocks it covers are claimed before
the request runs, which computes them; a later request with the same mark renews the claim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from serve.api.protocol.anthropic import CacheControl, InputBlock, MessagesRequest
from serve.engine.async_engine import AsyncEngine
from serve.errors import InvalidRequest

logger = logging.getLogger(__name__)

_SECONDS = (("5m", 300.0), ("1h", 3600.0))


@dataclass(frozen=True, slots=True)
class Marked:
    """The beginning of a conversation up to the last mark, and how long it is to stay."""

    body: MessagesRequest
    ttl_s: float


def marked_prefix(body: MessagesRequest) -> Marked | None:
    """What a request marks; None when it marks nothing."""
    for i in reversed(range(len(body.messages))):
        content, cut = _up_to_mark(body.messages[i].content)
        if cut is not None:
            last = body.messages[i].model_copy(update={"content": content})
            messages = [*body.messages[:i], last]
            return Marked(body.model_copy(update={"messages": messages}), _ttl_s(cut))
    system, cut = _up_to_mark(body.system or "")
    if cut is None:
        return None
    return Marked(body.model_copy(update={"system": system, "messages": []}), _ttl_s(cut))


@dataclass(frozen=True, slots=True)
class Written:
    """What a mark makes the request put into the cache, in tokens of full blocks: the part up to
    the mark, and how much of it was not there before."""

    num_marked: int = 0
    num_new: int = 0

    def beside(self, num_read: int) -> int:
        """How many tokens are written when so many turn out to be read."""
        return min(self.num_new, max(0, self.num_marked - num_read))


async def pin_common(
    engine: AsyncEngine, prompt: Sequence[int], rendered: Sequence[int], ttl_s: float
) -> Written:
    """Pin what the prompt has in common with its marked part, which was rendered by itself: an
    unfinished conversation may end differently. A prefix that cannot be pinned is not an error: it
    is still cached as long as there is room."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, rendered, strict=False))
    marked = list(prompt[: sum(1 for _ in pairs)])
    try:
        pin = await engine.control("pin", token_ids=marked, cache_salt="", ttl_s=ttl_s)
    except InvalidRequest as refusal:
        logger.info("cache_control: %s", refusal)
        block_size = engine.ready.block_size
        cached = len(marked) // block_size * block_size if engine.ready.prefix_caching else 0
        return Written(cached, cached)
    num_new = pin["num_blocks"] - pin["num_cached_blocks"]
    return Written(pin["num_tokens"], num_new * engine.ready.block_size)


def _up_to_mark(
    content: str | Sequence[InputBlock],
) -> tuple[list[InputBlock], CacheControl | None]:
    """The blocks up to the last one with a mark, and the mark."""
    if isinstance(content, str):
        return [], None
    for i in reversed(range(len(content))):
        if (mark := content[i].cache_control) is not None:
            return list(content[: i + 1]), mark
    return [], None


def _ttl_s(mark: CacheControl) -> float:
    return dict(_SECONDS)[mark.ttl]
