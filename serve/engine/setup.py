"""What clients have set in a running engine, so that the next one can be set up the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KeptPin:
    """A pinned prefix, as it was asked for. `expires_at` is None for one without an end."""

    token_ids: list[int]
    cache_salt: str
    expires_at: float | None


class EngineSetup:
    """Live settings and pins: the calls of `AsyncEngine.control` that outlive an engine."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._pins: dict[str, KeptPin] = {}

    def note(self, name: str, args: dict[str, Any], answer: Any) -> None:
        """A call was answered."""
        match name:
            case "configure":
                self._settings.update(args)
            case "pin":
                ttl_s = args["ttl_s"]
                expires_at = None if ttl_s is None else time.monotonic() + ttl_s
                self._pins[answer["id"]] = KeptPin(
                    args["token_ids"], args["cache_salt"], expires_at
                )
                self._drop_expired()
            case "unpin":
                self._pins.pop(args["pin_id"], None)

    def calls(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and arguments of the calls that set another engine up the same way: each setting
        as it was set last, each pin with the time that is left to it."""
        if self._settings:
            yield "configure", dict(self._settings)
        self._drop_expired()
        now = time.monotonic()
        for pin in list(self._pins.values()):
            ttl_s = None if pin.expires_at is None else pin.expires_at - now
            args = {"token_ids": pin.token_ids, "cache_salt": pin.cache_salt, "ttl_s": ttl_s}
            yield "pin", args

    def _drop_expired(self) -> None:
        now = time.monotonic()
        self._pins = {
            pin_id: pin
            for pin_id, pin in self._pins.items()
            if pin.expires_at is None or pin.expires_at > now
        }
