"""Outputs put together: whole choices for an answer in one piece, larger steps for a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from serve.api.answering.generation import Outputs
from serve.api.answering.parts import Part, Piece, text_of
from serve.api.answering.scores import Scores
from serve.api.protocol.common import FinishedBy
from serve.engine.outputs import RequestOutput, joined
from serve.messages import FinishReason, TokenLogprobs


@dataclass(slots=True)
class Choice:
    """One choice put together from its outputs; changed only by `add`."""

    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    hides_last: bool = False
    scores: Scores | None = None  # writes the log-probabilities, which then are not kept here

    def add(self, parts: Sequence[Part], output: RequestOutput) -> None:
        """Append a piece."""
        self.parts += parts
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.hides_last = output.hides_last

    @property
    def text(self) -> str:
        """Its words."""
        return text_of(self.parts)

    @property
    def ended_by(self) -> FinishedBy:
        """`finish_reason` as the API spells it."""
        match self.finish_reason:
            case FinishReason.STOP:
                return "stop"
            case FinishReason.REPETITION:
                return "repetition"
            case _:
                return "length"


async def collect(outputs: Outputs, scores: Sequence[Scores] = ()) -> list[Choice]:
    """Generate everything, close the outputs, and return it whole.

    With `scores`, one per choice, log-probabilities go there and not into the choices.
    """
    choices = [Choice() for _ in outputs.tally.generated]
    for choice, writer in zip(choices, scores, strict=False):
        choice.scores = writer
    try:
        async for index, parts, output in outputs:
            if scores:
                await scores[index].add(output)
                output = output._replace(logprobs=None, prompt_logprobs=None)
            choices[index].add(parts, output)
    finally:
        await outputs.aclose()
    return choices


def in_intervals(outputs: Outputs, interval: int | None) -> AsyncIterator[Piece]:
    """The pieces, joined so that each but a choice's first and last has `interval` tokens."""
    return outputs if interval is None or interval == 1 else _held_back(outputs, interval)


async def _held_back(outputs: Outputs, interval: int) -> AsyncGenerator[Piece, None]:
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
