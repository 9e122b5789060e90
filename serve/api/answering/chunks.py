"""The chunks of a stream: how many tokens make one, and its bytes. What never changes is encoded
once per stream: a stream writes one chunk per token, and building and dumping a dict for each would
cost more than all the rest.

The JSON is ASCII: U+2028, U+2029 and U+0085 are ends of lines to many clients.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from serve.api.answering.generation import Tally
from serve.api.answering.parts import Part, Piece
from serve.api.protocol.common import StreamOptions
from serve.engine.async_engine import AsyncEngine
from serve.engine.outputs import RequestOutput, joined

text_json = encode_basestring_ascii
"""A text as ASCII JSON."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer and all its chunks say about themselves."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, Any]:
        """As JSON fields."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def new_envelope(engine: AsyncEngine, model: str | None, kind: str, answer_id: str) -> Envelope:
    """An envelope of now. `model`: the name that was asked for, under which is answered."""
    return Envelope(
        id=answer_id,
        object=kind,
        created=int(time.time()),
        model=engine.model.names[0] if model is None else model,
        system_fingerprint=fingerprint(engine),
    )


def fingerprint(engine: AsyncEngine) -> str:
    """Changes whenever a setting changes that may change what a seed produces."""
    defaults = sorted(engine.model.generation_defaults.items())
    parts = f"{engine.ready.identity}\0{defaults}"
    return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:10]


class ChunkWriter:
    """Writes the chunks of one stream; usage figures are read from `tally` as they stand.

    `tells_metrics`: the stream ends with the request's metrics.
    """

    def __init__(
        self,
        envelope: Envelope,
        options: StreamOptions | None,
        tally: Tally,
        *,
        tells_metrics: bool | None = False,
    ) -> None:
        head = json.dumps(envelope.fields(), separators=(",", ":"))
        self._head = f"data: {head[:-1]},"
        self._wants_usage = bool(options and options.include_usage)
        self._always_usage = self._wants_usage and bool(options and options.continuous_usage_stats)
        self._tells_metrics = tells_metrics
        self._tally = tally

    def chunk(self, index: int, payload: str) -> bytes:
        """One choice's news: `payload` holds the choice's other fields as JSON text."""
        event = (
            f'{self._head}"choices":[{{"index":{index},{payload},'
            f'"finish_reason":null}}]{self._usage()}}}\n\n'
        )
        return event.encode("ascii")

    def last_chunk(
        self, index: int, payload: str, reason: str, stop_reason: str | int | None
    ) -> bytes:
        """The one chunk of a choice that says why it ended."""
        event = (
            f'{self._head}"choices":[{{"index":{index},{payload},'
            f'"finish_reason":"{reason}","stop_reason":{json.dumps(stop_reason)}}}]'
            f"{self._usage()}}}\n\n"
        )
        return event.encode("ascii")

    def figures_chunk(self) -> bytes:
        """The extra chunk without choices; empty unless the client asked for usage or metrics."""
        if not (self._wants_usage or self._tells_metrics):
            return b""
        figures = f',"usage":{self._usage_json()}' if self._wants_usage else ""
        if self._tells_metrics:
            figures += f',"metrics":{self._tally.metrics().model_dump_json()}'
        return f'{self._head}"choices":[]{figures}}}\n\n'.encode("ascii")

    def _usage(self) -> str:
        if self._always_usage:
            return f',"usage":{self._usage_json()}'
        return ',"usage":null' if self._wants_usage else ""

    def _usage_json(self) -> str:
        return self._tally.usage().model_dump_json()


def in_intervals(outputs: AsyncIterator[Piece], interval: int | None) -> AsyncIterator[Piece]:
    """The pieces, joined so that each but a choice's first and last has `interval` tokens."""
    return outputs if interval is None or interval == 1 else _held_back(outputs, interval)


async def _held_back(outputs: AsyncIterator[Piece], interval: int) -> AsyncGenerator[Piece, None]:
    held: dict[int, tuple[list[Part], list[RequestOutput]]] = {}
    begun: set[int] = set()
    async for index, new_parts, output in outputs:
        parts, pieces = held.setdefault(index, ([], []))
        parts += new_parts
        pieces.append(output)
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        ready = output.finish_reason is not None or num_tokens >= interval
        if ready or (index not in begun and num_tokens):
            begun.add(index)
            del held[index]
            yield index, parts, joined(pieces)
