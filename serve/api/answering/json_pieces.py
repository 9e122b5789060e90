"""An answer of any size in one piece: what is large in it stays in the pieces it was written in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.api.answering.choices import Choice
from serve.api.answering.scores import Scores

_PLACE = re.compile('"(prompt_logprobs|logprobs)":null')
_SENT_AT_ONCE = 2**18


class JsonPieces(Response):
    """Sends JSON as fast as its reader takes it."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._pieces = pieces
        self.init_headers({"Content-Length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer."""
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        held: list[bytes] = []
        size = 0
        for piece in self._pieces:
            held.append(piece)
            size += len(piece)
            if size >= _SENT_AT_ONCE:
                body, held, size = b"".join(held), [], 0
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"".join(held)})


def with_scores(answer: BaseModel, choices: Sequence[Choice]) -> list[bytes]:
    """The answer's JSON; the choices' scores stand where it has null for log-probabilities.

    A text cannot be taken for the place of one: within texts quotes have a backslash.
    """
    text = answer.model_dump_json(exclude_unset=True)
    scores = [choice.scores for choice in choices if choice.scores is not None]
    return [piece.encode() for piece in (_filled(text, scores) if scores else [text])]


def _filled(text: str, scores: Sequence[Scores]) -> Iterator[str]:
    of_choices, of_prompts = iter(scores), iter(scores)
    between, *rest = _PLACE.split(text)
    yield between
    for field, after in zip(rest[::2], rest[1::2], strict=True):
        yield f'"{field}":'
        yield from (
            next(of_choices).pieces() if field == "logprobs" else next(of_prompts).prompt_pieces()
        )
        yield after
