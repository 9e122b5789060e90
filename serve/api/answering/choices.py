"""Outputs put together: whole choices, for an answer in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.api.answering.generation import Outputs
from serve.api.answering.parts import Part, text_of
from serve.api.answering.scores import Scores
from serve.api.protocol.common import FinishedBy
from serve.engine.outputs import RequestOutput
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
