"""`/v1/prefix_cache/pin` and `/reset_prefix_cache`: prefixes that stay in the cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from serve.api.protocol.bounds import MAX_TOKEN_IDS, Listed, ModelName, Name
from serve.api.protocol.chat import Messages, TemplateFields
from serve.api.protocol.common import Finite, ResponseModel, TokenId


class PinRequest(TemplateFields):
    """What to keep: the beginning of a conversation, a text or token ids; one of the three."""

    model: ModelName | None = None
    messages: Messages | None = None
    prompt: str | None = None
    token_ids: Annotated[Listed[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS)] | None = (
        None
    )
    cache_salt: Name | None = None
    ttl: Annotated[Finite, Field(gt=0)] | None = None  # seconds; without it, until it is unpinned
    user: Name | None = None


class PinnedPrefix(ResponseModel):
    """One pin. The tokens are those of the prefix's full blocks; the rest is not cached."""

    id: str
    object: Literal["prefix_cache.pin"] = "prefix_cache.pin"
    num_tokens: int
    num_blocks: int
    num_cached_blocks: int
    expires_in_s: float | None


class CacheSizes(ResponseModel):
    """What pins take of the KV pool, and may take."""

    num_pins: int
    num_pinned_blocks: int
    max_pinned_blocks: int


class NewPin(PinnedPrefix, CacheSizes):
    """A pin that has just been made, or was there and has been renewed."""

    is_new: bool


class PinList(CacheSizes):
    """All pins."""

    object: Literal["list"] = "list"
    data: list[PinnedPrefix]


class Unpinned(ResponseModel):
    """A pin is gone; its blocks stay until they are needed for something else."""

    id: str
    object: Literal["prefix_cache.pin"] = "prefix_cache.pin"
    deleted: bool = True


class CacheReset(CacheSizes):
    """What was forgotten; what is pinned was not."""

    num_blocks_forgotten: int
