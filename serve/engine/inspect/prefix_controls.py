"""What the front may ask of the prefix cache: to keep a prefix, to let go of one, to be emptied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve.errors import InvalidRequest
from serve.kv_cache.manager import KVCacheManager
from serve.kv_cache.pins import Pin
from serve.kv_cache.prefix_index import BlockHashes

Values = dict[str, Any]


class PrefixControls:
    """Answers by name; see `Controls`."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._prefixes = kv.prefixes
        self._clock = clock

    def pin(self, args: Mapping[str, Any]) -> Values:
        """Keep the full blocks of `token_ids` (under `cache_salt`) for `ttl_s` seconds, or until
        they are let go of. The same prefix is the same pin. Raises InvalidRequest."""
        kv, prefixes = self._kv, self._prefixes
        token_ids, ttl_s = args["token_ids"], args["ttl_s"]
        if not kv.enable_prefix_caching:
            raise InvalidRequest("nothing can be pinned: the prefix cache is off.")
        num_tokens = len(token_ids) // kv.block_size * kv.block_size
        if not num_tokens:
            raise InvalidRequest(
                f"the prefix has {len(token_ids)} tokens, and only full blocks of {kv.block_size} "
                "are cached: there is nothing to pin."
            )
        chains = self._chains(token_ids, num_tokens, args["cache_salt"])
        if not chains:
            raise InvalidRequest(
                f"a prefix of {len(token_ids)} tokens is not shared by longer prompts: this "
                "model's keys depend on a prompt's whole length. Pin a shorter one."
            )
        hashes = tuple(value for chain in chains for value in chain.values)
        now = self._clock()
        prefixes.unpin_expired(now)
        pin_id = f"pin-{hashes[-1].hex()[:24]}"
        expires_at = math.inf if ttl_s is None else now + ttl_s
        is_new = pin_id not in prefixes.pins.by_id
        if not prefixes.pin(Pin(pin_id, hashes, expires_at, len(chains))):
            raise InvalidRequest(self._why_not(hashes))
        described = self._describe(prefixes.pins.by_id[pin_id], now)
        return {**described, **self._sizes(), "is_new": is_new}

    def unpin(self, args: Mapping[str, Any]) -> bool:
        """Let go of `pin_id`; False when it is unknown."""
        return self._prefixes.unpin(args["pin_id"])

    def pins(self, args: Mapping[str, Any]) -> Values:
        """All pins, and what they may take together."""
        now = self._clock()
        self._prefixes.unpin_expired(now)
        pins = [self._describe(pin, now) for pin in self._prefixes.pins.by_id.values()]
        return {"pins": pins, **self._sizes()}

    def reset(self, args: Mapping[str, Any]) -> Values:
        """Forget every prefix that is not pinned."""
        self._prefixes.unpin_expired(self._clock())
        return {"num_blocks_forgotten": self._prefixes.forget(), **self._sizes()}

    def _chains(self, token_ids: list[int], num_tokens: int, salt: str) -> list[BlockHashes]:
        """The prefix's blocks as every prompt that goes on from there may have to find them."""
        chains = []
        for extras in self._kv.prompt_regimes.extras_beyond(num_tokens):
            chain = BlockHashes(self._kv.block_size, cache_salt=salt, **extras)
            chain.extend(token_ids)
            chains.append(chain)
        return chains

    def _why_not(self, hashes: Sequence[bytes]) -> str:
        kv, pins = self._kv, self._prefixes.pins
        return (
            f"this prefix needs {pins.num_new(hashes)} blocks more; {pins.num_blocks} of at "
            f"most {pins.max_blocks} are pinned, of {kv.num_blocks} in all. Unpin others, or start "
            "the server with a larger --max-pinned-share (what one request of --max-model-len "
            "needs is never pinned)."
        )

    def _describe(self, pin: Pin, now: float) -> Values:
        expires_in_s = None if pin.expires_at == math.inf else round(pin.expires_at - now, 3)
        return {
            "id": pin.pin_id,
            "num_tokens": pin.num_blocks * self._kv.block_size,
            "num_blocks": len(pin.hashes),
            "num_cached_blocks": self._prefixes.num_among(pin.hashes),
            "expires_in_s": expires_in_s,
        }

    def _sizes(self) -> Values:
        pins = self._prefixes.pins
        return {
            "num_pins": len(pins.by_id),
            "num_pinned_blocks": pins.num_blocks,
            "max_pinned_blocks": pins.max_blocks,
        }
